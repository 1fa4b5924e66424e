"""SGLang on 4-bit weights: the plugin that the entry point group `sglang.srt.plugins` names.

SGLang calls `register` in each of its processes; docs/engines.md says what follows.
"""

from __future__ import annotations


def register() -> None:
    """Let SGLang take our kernels for the layers that they fit.

    Raises:
        ImportError: the installed SGLang lacks something that this needs; the sentence names both.
    """
    from blockscale.integrations.sglang import layers

    layers.register()
