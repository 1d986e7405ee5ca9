"""jaxthru trains transformer language models on JAX/XLA and says where every lost percent went."""
