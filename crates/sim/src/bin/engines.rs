//! A PostgreSQL and a Redis for experiments. Prints the URLs of both, and runs both until this program ends,
//! by Ctrl-C or otherwise. Nothing of the engines is left afterwards.

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
