//! A real PgBouncer in transaction mode. In this mode PgBouncer runs each transaction on any free session, so
//! session state (prepared statements, settings, LISTEN) may belong to another client at the next
//! transaction.

use std::io;
use std::process::{Child, Command};

use crate::supervisor::{self, Supervisor};
use crate::{Postgres, launch};

/// A running PgBouncer in front of a server. Dropping the value ends the process.
pub struct PgBouncer {
    child: Child,
    supervisor: Supervisor,
    port: u16,
}

impl PgBouncer {
    /// Whether PgBouncer is installed. A test without it calls [`crate::skip()`].
    pub fn is_installed() -> bool {
        std::env::split_paths(&supervisor::path()).any(|folder| folder.join("pgbouncer").exists())
    }

    /// Pools sessions of `server`, at most `sessions_max` for each database.
    ///
    /// # Panics
    /// When it cannot be started, with the reason.
    pub async fn in_front_of(server: &Postgres, sessions_max: u32) -> PgBouncer {
        match PgBouncer::open(server, sessions_max).await {
            Ok(pooler) => pooler,
            Err(error) => panic!("starting PgBouncer: {error}"),
        }
    }

    /// The URL of the server's database `name`, for the superuser.
    pub fn url_for(&self, name: &str) -> String {
        format!("postgres://postgres@127.0.0.1:{}/{name}", self.port)
    }

    /// The port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Its log so far.
    pub fn log(&self) -> String {
        launch::log(&self.supervisor)
    }

    async fn open(server: &Postgres, sessions_max: u32) -> io::Result<PgBouncer> {
        let supervisor = Supervisor::new("pgbouncer", "TERM")?;
        supervisor.write(&supervisor.folder().join("users.txt"), "\"postgres\" \"\"\n")?;
        let launched = launch::on_a_free_port(
            &supervisor,
            |port| command(&supervisor, server.port(), port, sessions_max),
            |_, logged| logged.contains("process up"),
        )
        .await?;
        Ok(PgBouncer { child: launched.child, supervisor, port: launched.port })
    }
}

impl Drop for PgBouncer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn command(
    supervisor: &Supervisor,
    server: u16,
    port: u16,
    sessions_max: u32,
) -> io::Result<Command> {
    let file = supervisor.folder().join("pgbouncer.ini");
    let users = supervisor.folder().join("users.txt");
    let settings = format!(
        "[databases]
* = host=127.0.0.1 port={server}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = trust
auth_file = {}
pool_mode = transaction
default_pool_size = {sessions_max}
max_client_conn = 500
",
        users.display()
    );
    supervisor.write(&file, &settings)?;
    let mut command = supervisor.command("pgbouncer");
    command.arg(file);
    Ok(command)
}
