"""Loading a user's .py or .cu file."""
