"""Components for MetaSchedule's loop: for `bs.tune`, and for a `tune_tasks` of one's own."""
