"""In place of torch for processes that need none: TVM imports it where it is, for two seconds."""

raise ModuleNotFoundError("No module named 'torch'", name="torch")
