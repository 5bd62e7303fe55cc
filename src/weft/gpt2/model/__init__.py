"""The GPT-2 model, its configuration, weights and sampling."""
