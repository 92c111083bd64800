"""The engine of all studies: runs and their results, the store, the runner, statistics, verdicts, publishing."""
