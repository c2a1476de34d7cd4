//! Real engines and real faults for the tests and benchmarks: nothing here ships.
//!
//! Each engine runs in a private folder, on a port of its own, as an unprivileged user when we are
//! root, and is gone when the test process is, however that one ended (`keeper.rs`). Doors panic with
//! the reason: a test that cannot have its engine has failed.

mod keeper;
mod launch;
mod pgbouncer;
mod port;
mod postgres;
pub mod powerloss;
mod proxy;
mod redis;
mod skip;
mod tls;

pub use pgbouncer::PgBouncer;
pub use port::free as free_port;
pub use postgres::{Mode, Postgres, Tls};
pub use proxy::{READY_FOR_QUERY, TcpProxy, Traffic, Trap};
pub use redis::{Redis, RedisReply};
pub use skip::skip;
