//! A PostgreSQL and a Redis to try things on: prints their URLs and holds them until it is ended,
//! by Ctrl-C or otherwise; then nothing of them is left.

use std::io::{self, Write};

use hapax_sim::{Postgres, Redis};

#[tokio::main]
async fn main() -> io::Result<()> {
    let (postgres, redis) = tokio::join!(Postgres::start(), Redis::start());
    let mut out = io::stdout();
    writeln!(out, "HAPAX_DATABASE_URL={}", postgres.url())?;
    writeln!(out, "HAPAX_REDIS_URL={}", redis.url())?;
    out.flush()?;
    tokio::signal::ctrl_c().await
}
