//! Realistic sample events of every preset that can be signed for, for `hapax send` and tests.
