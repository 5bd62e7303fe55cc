"""GPT-2 on Weft's operators: configuration, model, data, training, checkpoints, sampling."""
