//! Real engines and real faults for the tests and benchmarks: nothing here ships.
//!
//! Each engine runs in a private folder, on a port of its own, as an unprivileged user when we are
//! root, and is gone when the test process is, however that one ended (`supervisor.rs`). Doors panic with
//! the reason: a test that cannot have its engine has failed.

mod launch;
mod pgbouncer;
mod port;
mod postgres;
pub mod powerloss;
mod redis;
mod skip;
mod supervisor;
mod tcp_proxy;
mod tls;

pub use pgbouncer::PgBouncer;
pub use port::free as free_port;
pub use postgres::{Postgres, StopMode, Tls};
pub use redis::{Redis, RedisReply};
pub use skip::skip;
pub use tcp_proxy::{READY_FOR_QUERY, TcpProxy, Traffic, Trap};
