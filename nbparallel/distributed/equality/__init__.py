"""The comparison of data across ranks, for `assert_same`."""
