"""Copies and stores that complete later: cp.async, bulk, tensors, st.async."""
