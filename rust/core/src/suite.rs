//! Finding the tasks of a suite.
