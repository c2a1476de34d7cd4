//! Real PostgreSQL servers that tests start, stop, kill, promote and query. `fsync` and `synchronous_commit`
//! stay on, as in production, or the tests would prove nothing.
//!
//! A server takes about two seconds to create, a database some hundredths of a second. So tests share
//! [`Postgres::shared`] and create a database each. Only a test that kills or pauses the server starts its
//! own.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tokio::sync::{Mutex, OnceCell};
use tokio_postgres::{Config, NoTls, SimpleQueryMessage};

use crate::supervisor::{self, Supervisor};
use crate::{launch, tls};

/// A running or stopped PostgreSQL server. Dropping the value deletes the server with all its data.
pub struct Postgres {
    // This field is dropped before the supervisor, so that the server is reaped before the watchdog
    // ends.
    postmaster: Mutex<Option<Child>>,
    supervisor: Supervisor,
    binaries: PathBuf,
    port: u16,
    databases: AtomicU32,
}

/// How a server stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopMode {
    /// Open transactions are rolled back before an orderly shutdown.
    Fast,
    /// All processes exit at once. The next start recovers, as after a crash.
    Immediate,
}

/// Whether commits on the primary wait for a standby.
#[derive(Clone, Copy)]
enum StandbyMode {
    Synchronous,
    Asynchronous,
}

/// The files with which a client trusts a server started by [`Postgres::with_tls`].
#[derive(Clone, Debug)]
pub struct Tls {
    /// The authority's certificate, as a PEM file: `sslrootcert`.
    pub authority_file: PathBuf,
    /// A role that the server accepts over TLS only.
    pub role: &'static str,
}

impl Postgres {
    /// The server that all tests of this process share. Create a database on it, and never stop it.
    ///
    /// # Panics
    /// When no server can be started, with the reason.
    pub async fn shared() -> &'static Postgres {
        static SHARED: OnceCell<Postgres> = OnceCell::const_new();
        SHARED.get_or_init(Postgres::start).await
    }

    /// A new server, which the test may break.
    ///
    /// # Panics
    /// When it cannot be started, with the reason.
    pub async fn start() -> Postgres {
        Postgres::with_settings(&[]).await
    }

    /// A new server with settings of `postgresql.conf`, which override the defaults here.
    ///
    /// # Panics
    /// When it cannot be started, with the reason.
    pub async fn with_settings(settings: &[(&str, &str)]) -> Postgres {
        match Postgres::initialise(settings).await {
            Ok(server) => server,
            Err(error) => panic!("starting PostgreSQL: {error}"),
        }
    }

    /// A new server with TLS, and with a certificate for `localhost` and `127.0.0.1` from a new authority. The
    /// role in [`Tls`] is accepted over TLS only.
    ///
    /// # Panics
    /// When it cannot be started, with the reason.
    pub async fn with_tls() -> (Postgres, Tls) {
        match Postgres::initialise_with_tls().await {
            Ok(server) => server,
            Err(error) => panic!("starting PostgreSQL with TLS: {error}"),
        }
    }

    /// Creates an empty database on this server, with a unique name from `label`. Returns its URL.
    ///
    /// # Panics
    /// When the server returns an error.
    pub async fn create_database(&self, label: &str) -> String {
        self.create_database_from(label, "template0").await
    }

    /// Creates a database as a copy of another one on this server, to which no client may be connected. Returns
    /// its URL.
    ///
    /// # Panics
    /// When the server returns an error.
    pub async fn create_database_from(&self, label: &str, template: &str) -> String {
        let number = self.databases.fetch_add(1, Ordering::Relaxed);
        let name = format!("{label}_{number}");
        self.execute(&format!("CREATE DATABASE \"{name}\" TEMPLATE \"{template}\"")).await;
        self.url_for(&name)
    }

    /// Drops a database of [`Postgres::create_database`], even with open connections. Each takes some megabytes,
    /// and hundreds of tests would fill a small disk.
    ///
    /// # Panics
    /// When the server returns an error.
    pub async fn drop_database(&self, url: &str) {
        let name = url.rsplit('/').next().unwrap_or_default();
        self.execute(&format!("DROP DATABASE \"{name}\" WITH (FORCE)")).await;
    }

    /// The URL of the database `postgres`, for the superuser.
    pub fn url(&self) -> String {
        self.url_for("postgres")
    }

    /// The URL of the database `name`, for the superuser.
    pub fn url_for(&self, name: &str) -> String {
        format!("postgres://postgres@127.0.0.1:{}/{name}", self.port)
    }

    /// The port on 127.0.0.1, which stays the same over restarts.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// A program of the server's installation, or one of that name on the path (`psql`).
    pub fn program(&self, name: &str) -> Option<PathBuf> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let mut folders =
            std::iter::once(self.binaries.clone()).chain(std::env::split_paths(&path));
        folders.find_map(|folder| Some(folder.join(name)).filter(|program| program.exists()))
    }

    /// Whether [`Postgres::standby`] works: not every build of PostgreSQL has `pg_basebackup`, and it must be of
    /// the server's version.
    pub fn can_have_standby(&self) -> bool {
        self.binaries.join(BASE_BACKUP).exists()
    }

    /// The server's log so far.
    pub fn log(&self) -> String {
        launch::log(&self.supervisor)
    }

    /// Runs statements as the superuser in the database `postgres`. Returns the first column of every row.
    ///
    /// # Panics
    /// When the server cannot be reached or returns an error.
    pub async fn execute(&self, sql: &str) -> Vec<Option<String>> {
        Postgres::execute_at(&self.url(), sql).await
    }

    /// Runs statements at any URL without TLS. Returns the first column of every row.
    ///
    /// # Panics
    /// When the server cannot be reached or returns an error.
    pub async fn execute_at(url: &str, sql: &str) -> Vec<Option<String>> {
        match query(url, sql).await {
            Ok(rows) => rows,
            Err(error) => panic!("{sql}: {}", supervisor::with_causes(&error)),
        }
    }

    /// The postmaster's process id, while it runs.
    pub async fn pid(&self) -> Option<u32> {
        self.postmaster.lock().await.as_ref().map(Child::id)
    }

    /// Stops the server, if it runs, and waits until it is down.
    ///
    /// # Panics
    /// When it does not stop in time.
    pub async fn stop(&self, mode: StopMode) {
        let signal = match mode {
            StopMode::Fast => Signal::INT,
            StopMode::Immediate => Signal::QUIT,
        };
        let Some(mut postmaster) = self.postmaster.lock().await.take() else { return };
        supervisor::signal(postmaster.id(), signal);
        if let Err(error) = supervisor::ended("PostgreSQL to stop", &mut postmaster).await {
            panic!("stopping PostgreSQL: {error}");
        }
    }

    /// Sends SIGKILL to the postmaster, as the kernel does when memory is short. Returns when its child processes
    /// have ended too, so that [`Postgres::start_again`] finds none of them.
    ///
    /// # Panics
    /// When the processes do not end in time.
    pub async fn kill_postmaster(&self) {
        let Some(mut postmaster) = self.postmaster.lock().await.take() else { return };
        // The postmaster is stopped first, so that it starts no child while its children are
        // listed.
        supervisor::signal(postmaster.id(), Signal::STOP);
        let orphans = supervisor::children(postmaster.id());
        supervisor::signal(postmaster.id(), Signal::KILL);
        if let Err(error) = supervisor::ended("the postmaster's end", &mut postmaster).await {
            panic!("killing the postmaster: {error}");
        }
        // Orphans exit by themselves. An orphan that is stopped or busy does not exit, and is
        // killed.
        let helped = Instant::now() + ORPHANS_EXIT_TIMEOUT;
        let gone = supervisor::wait_for("orphans to leave", || {
            let living =
                orphans.iter().filter(|pid| supervisor::is_alive(**pid)).collect::<Vec<_>>();
            if Instant::now() > helped {
                living.iter().for_each(|pid| supervisor::signal(**pid, Signal::KILL));
            }
            Ok(living.is_empty().then_some(()))
        });
        if let Err(error) = gone.await {
            panic!("killing the postmaster: {error}");
        }
    }

    /// Waits until the server answers a query. A server that recovers from a crash of a backend answers none.
    ///
    /// # Panics
    /// When it does not answer in time.
    pub async fn wait_until_ready(&self) {
        let deadline = Instant::now() + supervisor::ENGINE_TIMEOUT;
        while let Err(error) = query(&self.url(), "SELECT 1").await {
            assert!(Instant::now() < deadline, "no answer: {}", supervisor::with_causes(&error));
            tokio::time::sleep(supervisor::POLL).await;
        }
    }

    /// Starts a stopped or killed server with its port and data.
    ///
    /// # Panics
    /// When it does not start, with its log.
    pub async fn start_again(&self) {
        let mut postmaster = self.postmaster.lock().await;
        assert!(postmaster.is_none(), "the server runs already");
        let command = self::postmaster(&self.supervisor, &self.binaries, self.port);
        match launch::restart(&self.supervisor, command, |pid, _| ready(&self.supervisor, pid))
            .await
        {
            Ok(child) => *postmaster = Some(child),
            Err(error) => panic!("starting PostgreSQL again: {error}"),
        }
    }

    /// Terminates every client session and waits until they have ended, so that no later check counts them.
    /// Returns how many there were. With `database`, only the sessions of that database are ended; the
    /// shared server needs this.
    ///
    /// # Panics
    /// When the server cannot be reached.
    pub async fn kill_backends(&self, database: Option<&str>) -> usize {
        let there = database.map_or(String::new(), |name| format!("AND datname = '{name}'"));
        let ended = self
            .execute(&format!(
                "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity
                 WHERE backend_type = 'client backend' AND application_name <> '{OWN_APPLICATION_NAME}' {there}"
            ))
            .await;
        ended.len()
    }

    /// Sends SIGKILL to one client's backend. PostgreSQL then assumes that shared memory is corrupt, ends all
    /// sessions and recovers. Returns whether a backend was found.
    ///
    /// # Panics
    /// When the server cannot be reached.
    pub async fn crash_backend(&self) -> bool {
        let pids = self
            .execute(&format!(
                "SELECT pid FROM pg_stat_activity
                 WHERE backend_type = 'client backend' AND application_name <> '{OWN_APPLICATION_NAME}' LIMIT 1"
            ))
            .await;
        let victim = pids.into_iter().flatten().find_map(|pid| pid.parse().ok());
        if let Some(pid) = victim {
            supervisor::signal(pid, Signal::KILL);
        }
        victim.is_some()
    }

    /// A standby of this server. From now on every commit here waits for it.
    ///
    /// # Panics
    /// When it cannot be created or does not catch up.
    pub async fn standby(&self) -> Postgres {
        match self.follow(StandbyMode::Synchronous).await {
            Ok(standby) => standby,
            Err(error) => panic!("starting a standby: {error}"),
        }
    }

    /// A standby of this server that no commit here waits for.
    ///
    /// # Panics
    /// When it cannot be created or does not connect.
    pub async fn asynchronous_standby(&self) -> Postgres {
        match self.follow(StandbyMode::Asynchronous).await {
            Ok(standby) => standby,
            Err(error) => panic!("starting a standby: {error}"),
        }
    }

    /// Waits until this standby has replayed everything that `primary` has committed, and then disconnects it: it
    /// receives no later commit.
    ///
    /// # Panics
    /// When it does not catch up or does not disconnect.
    pub async fn stop_following(&self, primary: &Postgres) {
        let committed = primary.execute("SELECT pg_current_wal_lsn()").await.remove(0);
        let committed = committed.unwrap_or_default();
        let caught_up = format!("SELECT 1 WHERE pg_last_wal_replay_lsn() >= '{committed}'");
        self.wait_for_row(&caught_up, "the standby does not catch up").await;
        self.execute("ALTER SYSTEM SET primary_conninfo = ''").await;
        self.execute("SELECT pg_reload_conf()").await;
        let alone = "SELECT 1 WHERE NOT EXISTS (SELECT FROM pg_stat_wal_receiver)";
        self.wait_for_row(alone, "the standby goes on receiving").await;
        let let_go = "SELECT 1 WHERE NOT EXISTS (SELECT FROM pg_stat_replication)";
        primary.wait_for_row(let_go, "the primary goes on sending").await;
    }

    /// Promotes a standby to primary. The old primary should be dead or disconnected by now.
    ///
    /// # Panics
    /// When it is not a standby, or the promotion does not finish.
    pub async fn promote(&self) {
        let promoted = self.execute("SELECT pg_promote(true, 120)").await;
        assert_eq!(promoted, [Some("t".to_owned())], "the standby was not promoted");
    }

    async fn initialise(settings: &[(&str, &str)]) -> io::Result<Postgres> {
        let (supervisor, binaries) = Postgres::cluster().await?;
        configure(&supervisor, settings)?;
        Postgres::open(supervisor, binaries).await
    }

    async fn initialise_with_tls() -> io::Result<(Postgres, Tls)> {
        let (supervisor, binaries) = Postgres::cluster().await?;
        let issued = tls::issue()?;
        let authority_file = supervisor.folder().join("authority.pem");
        let certificate = supervisor.folder().join("server.pem");
        let key = supervisor.folder().join("server.key");
        supervisor.write(&authority_file, &issued.authority)?;
        supervisor.write(&certificate, &issued.certificate)?;
        supervisor.write(&key, &issued.key)?;
        let certificate = certificate.display().to_string();
        let key = key.display().to_string();
        configure(
            &supervisor,
            &[("ssl", "on"), ("ssl_cert_file", &certificate), ("ssl_key_file", &key)],
        )?;
        let hba_file = data(&supervisor).join("pg_hba.conf");
        let refused = format!("hostnossl all {TLS_ROLE} 127.0.0.1/32 reject\n");
        supervisor.write(&hba_file, &format!("{refused}{}", fs::read_to_string(&hba_file)?))?;

        let server = Postgres::open(supervisor, binaries).await?;
        query(&server.url(), &format!("CREATE ROLE {TLS_ROLE} SUPERUSER LOGIN"))
            .await
            .map_err(io::Error::other)?;
        Ok((server, Tls { authority_file, role: TLS_ROLE }))
    }

    /// A directory with an empty cluster.
    async fn cluster() -> io::Result<(Supervisor, PathBuf)> {
        let binaries = binaries()?;
        let supervisor = Supervisor::new("postgres", "QUIT")?;
        let mut initdb = supervisor.command(binaries.join("initdb"));
        initdb.args(["--no-sync", "--no-instructions", "-A", "trust", "-U", "postgres"]);
        initdb.args(["-E", "UTF8", "--locale", "C", "-D"]).arg(data(&supervisor));
        supervisor.run(initdb).await?;
        Ok((supervisor, binaries))
    }

    /// Starts the cluster of a directory on a free port.
    async fn open(supervisor: Supervisor, binaries: PathBuf) -> io::Result<Postgres> {
        let launched = launch::on_a_free_port(
            &supervisor,
            |port| Ok(postmaster(&supervisor, &binaries, port)),
            |pid, _| ready(&supervisor, pid),
        )
        .await?;
        let postmaster = Mutex::new(Some(launched.child));
        let databases = AtomicU32::new(1);
        Ok(Postgres { postmaster, supervisor, binaries, port: launched.port, databases })
    }

    /// Waits until a query has a row.
    async fn wait_for_row(&self, sql: &str, otherwise: &str) {
        let deadline = Instant::now() + supervisor::ENGINE_TIMEOUT;
        while self.execute(sql).await.is_empty() {
            assert!(Instant::now() < deadline, "{otherwise}: {}", self.log());
            tokio::time::sleep(supervisor::POLL).await;
        }
    }

    async fn follow(&self, following: StandbyMode) -> io::Result<Postgres> {
        let supervisor = Supervisor::new("standby", "QUIT")?;
        let name = format!("standby_{}", self.databases.fetch_add(1, Ordering::Relaxed));
        let primary = format!("host=127.0.0.1 port={} user=postgres", self.port);
        let mut copy = supervisor.command(self.binaries.join(BASE_BACKUP));
        copy.args(["--no-sync", "--checkpoint=fast", "--wal-method=stream", "-d", &primary, "-D"]);
        copy.arg(data(&supervisor));
        supervisor.run(copy).await?;

        let conninfo = format!("{primary} application_name={name}");
        configure(&supervisor, &[("primary_conninfo", &conninfo)])?;
        supervisor.write(&data(&supervisor).join("standby.signal"), "")?;
        let standby = Postgres::open(supervisor, self.binaries.clone()).await?;

        let state = match following {
            StandbyMode::Asynchronous => "async",
            StandbyMode::Synchronous => {
                let wait = format!("ALTER SYSTEM SET synchronous_standby_names = '{name}'");
                self.execute(&wait).await;
                self.execute("SELECT pg_reload_conf()").await;
                "sync"
            }
        };
        let in_step = format!(
            "SELECT 1 FROM pg_stat_replication WHERE application_name = '{name}'
             AND state = 'streaming' AND sync_state = '{state}'"
        );
        self.wait_for_row(&in_step, "the standby does not keep up").await;
        Ok(standby)
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        // Ends the server at once. Otherwise only the watchdog would end it.
        if let Some(mut postmaster) = self.postmaster.get_mut().take() {
            supervisor::signal(postmaster.id(), Signal::CONT);
            supervisor::signal(postmaster.id(), Signal::QUIT);
            let _ = supervisor::reap(&mut postmaster);
        }
    }
}

/// The program that copies a running server.
const BASE_BACKUP: &str = "pg_basebackup";

/// The role that [`Postgres::with_tls`] accepts over TLS only.
const TLS_ROLE: &str = "tls_only";

/// Distinguishes the sessions of this file, which may still be closing, from those of the tests.
const OWN_APPLICATION_NAME: &str = "hapax-sim";

/// How long backends have to exit after their postmaster died.
const ORPHANS_EXIT_TIMEOUT: Duration = Duration::from_secs(2);

/// The settings of every server. The settings of a test follow and override them.
const SETTINGS: &[(&str, &str)] = &[
    ("listen_addresses", "127.0.0.1"),
    // The path of a socket is limited to 107 bytes, and a temporary directory may be longer.
    ("unix_socket_directories", ""),
    ("max_connections", "500"),
    ("shared_buffers", "64MB"),
    ("max_prepared_transactions", "10"),
];

/// Reads the postmaster's pid file, which shows when it accepts connections.
fn ready(supervisor: &Supervisor, pid: u32) -> bool {
    let file = fs::read_to_string(data(supervisor).join("postmaster.pid")).unwrap_or_default();
    let mut lines = file.lines().map(str::trim);
    // The file of a killed postmaster still exists when the next one starts.
    let ours = lines.next() == Some(pid.to_string().as_str());
    ours && matches!(lines.nth(6), Some("ready" | "standby"))
}

fn postmaster(supervisor: &Supervisor, binaries: &Path, port: u16) -> Command {
    let mut command = supervisor.command(binaries.join("postgres"));
    command.arg("-D").arg(data(supervisor)).arg("-p").arg(port.to_string());
    command
}

/// Appends settings to the config file. The last value of a name counts.
fn configure(supervisor: &Supervisor, settings: &[(&str, &str)]) -> io::Result<()> {
    let file = data(supervisor).join("postgresql.conf");
    let mut content = fs::read_to_string(&file)?;
    for (name, value) in SETTINGS.iter().chain(settings) {
        content.push_str(&format!("{name} = '{}'\n", value.replace('\'', "''")));
    }
    supervisor.write(&file, &content)
}

/// The directory in `HAPAX_TEST_POSTGRES_BIN`, else the newest Debian installation, else the one on the path.
fn binaries() -> io::Result<PathBuf> {
    if let Some(named) = std::env::var_os("HAPAX_TEST_POSTGRES_BIN") {
        return Ok(PathBuf::from(named));
    }
    let debian = fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let newest = debian
        .filter_map(|version| version.file_name().to_str()?.parse::<u32>().ok())
        .map(|version| (version, PathBuf::from(format!("/usr/lib/postgresql/{version}/bin"))))
        .filter(|(_, folder)| folder.join("initdb").exists())
        .max();
    if let Some((_, folder)) = newest {
        return Ok(folder);
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).find(|folder| folder.join("initdb").exists()).ok_or_else(|| {
        io::Error::new(io::ErrorKind::NotFound, "no initdb here; scripts/test installs PostgreSQL")
    })
}

fn data(supervisor: &Supervisor) -> PathBuf {
    supervisor.folder().join("data")
}

/// Runs statements on a new connection. A test's runtime ends before the shared server does, so no connection
/// may stay open between calls.
async fn query(url: &str, sql: &str) -> Result<Vec<Option<String>>, tokio_postgres::Error> {
    let mut config: Config = url.parse()?;
    config.application_name(OWN_APPLICATION_NAME);
    let (client, connection) = config.connect(NoTls).await?;
    let driven = async {
        let answer = client.simple_query(sql).await;
        drop(client);
        answer
    };
    let (answer, _) = tokio::join!(driven, connection);
    let rows = answer?.into_iter().filter_map(|message| match message {
        SimpleQueryMessage::Row(row) => Some(row.get(0).map(str::to_owned)),
        _ => None,
    });
    Ok(rows.collect())
}
