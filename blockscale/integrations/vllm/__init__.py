"""vLLM on 4-bit weights: the plugin that the entry point group `vllm.general_plugins` names.

vLLM calls `register` in each of its processes; docs/engines.md says what follows.
"""

from __future__ import annotations


def register() -> None:
    """Let vLLM take our kernels for the layers that they fit.

    Raises:
        ImportError: the installed vLLM lacks something that this needs; the sentence names both.
    """
    from blockscale.integrations.vllm import experts, linear

    linear.register()
    experts.register()
