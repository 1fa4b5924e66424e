"""What every room uses: errors, targets, shapes, index maps; imports nothing of ours."""
