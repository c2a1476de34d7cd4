//! Real engines and real faults for the tests and benchmarks: nothing here ships.
