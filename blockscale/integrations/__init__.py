"""Engines that load models themselves: ``import blockscale.integrations.transformers``."""
