//! Reading a few values out of raw JSON without believing more of it than needed.
