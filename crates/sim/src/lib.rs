//! Real engines and real faults for the tests and benchmarks: nothing here ships.
//!
//! Each engine runs in a private directory, on its own port, and as an unprivileged user if the tests run
//! as root. The engine ends when the test process ends, even if that process is killed (`supervisor.rs`).
//! Public functions panic with the reason: a test that cannot start its engine has failed.
//!
//! [`FaultyStore`] injects faults between a store and its callers, and [`SignedEvent`] makes events for a
//! store.

mod faulty_store;
mod launch;
mod pgbouncer;
mod port;
mod postgres;
pub mod powerloss;
mod redis;
mod signed_event;
mod skip;
mod supervisor;
mod tcp_proxy;
mod tls;

pub use faulty_store::{Act, FaultyStore, PLANNED};
pub use pgbouncer::PgBouncer;
pub use port::free as free_port;
pub use postgres::{Postgres, StopMode, Tls};
pub use redis::{Redis, RedisReply};
pub use signed_event::SignedEvent;
pub use skip::skip;
pub use tcp_proxy::{READY_FOR_QUERY, TcpProxy, TrafficMode, Trap};
