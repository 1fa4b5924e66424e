"""What a launch runs on: memories, clocks, gangs of warps, asynchronous work, hazards."""
