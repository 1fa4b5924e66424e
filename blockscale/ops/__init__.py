"""The torch functions, one file or folder a family."""
