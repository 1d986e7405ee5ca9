"""Text from a model: prefill by the training kernel, decoding with a static cache, sampling."""
