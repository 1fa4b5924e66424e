"""Libraries, their functions, and the checks of a call; never imports tvm."""
