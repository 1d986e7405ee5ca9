"""What the tests of the profiler share lies beside this file, where those of every room find it."""
