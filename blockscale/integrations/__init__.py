"""Engines that load models themselves: Hugging Face transformers, vLLM, SGLang."""
