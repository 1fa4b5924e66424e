"""The demo's causal language model: trained on the spot, put into NVFP4, run by transformers."""
