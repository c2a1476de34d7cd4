//! Real engines and real faults for the tests and benchmarks: nothing here ships.
//!
//! Each engine runs in a private folder, on a port of its own, as an unprivileged user when we are
//! root, and is gone when the test process is, however that one ended ([`keeper`]). Doors panic with
//! the reason: a test that cannot have its engine has failed.

mod keeper;
mod port;
mod postgres;
mod tls;

pub use postgres::{Mode, Postgres, Tls};
