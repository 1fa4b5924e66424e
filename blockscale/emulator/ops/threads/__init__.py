"""What threads do among themselves: barriers, mbarriers, votes, fences, pauses."""
