//! Head-and-tail buffer for tool output.
