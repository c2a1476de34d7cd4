//! Real Redis servers that tests start, pause, kill, flush and query. The client here implements only as much
//! of the protocol as tests need to set and read keys. This is not the client that ships.

use std::io;
use std::process::{Child, Command};

use rustix::process::Signal;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::sync::Mutex;

use crate::launch;
use crate::supervisor::{self, Supervisor};

/// A running or killed Redis that saves nothing by itself. Dropping the value ends the process.
pub struct Redis {
    // This field is dropped before the supervisor, as in `Postgres`.
    child: Mutex<Option<Child>>,
    supervisor: Supervisor,
    settings: Vec<(String, String)>,
    port: u16,
}

/// A reply of Redis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RedisReply {
    /// No such key.
    Nothing,
    /// A number.
    Integer(i64),
    /// A status or a value.
    Text(Vec<u8>),
    /// Several replies.
    List(Vec<RedisReply>),
    /// An error, with its message.
    Refused(String),
}

impl Redis {
    /// A new server.
    ///
    /// # Panics
    /// When it cannot be started, with the reason.
    pub async fn start() -> Redis {
        Redis::with_settings(&[]).await
    }

    /// A new server with settings of `redis.conf`, as `("maxmemory", "2mb")`.
    ///
    /// # Panics
    /// When it cannot be started, with the reason.
    pub async fn with_settings(settings: &[(&str, &str)]) -> Redis {
        match Redis::open(settings).await {
            Ok(server) => server,
            Err(error) => panic!("starting Redis: {error}"),
        }
    }

    /// The URL for clients.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/", self.port)
    }

    /// The port on 127.0.0.1, which stays the same over restarts.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The server's log so far.
    pub fn log(&self) -> String {
        launch::log(&self.supervisor)
    }

    /// Stops the process (SIGSTOP): connections stay open, and nothing is answered.
    pub async fn pause(&self) {
        self.signal(Signal::STOP).await;
    }

    /// Continues a paused process (SIGCONT).
    pub async fn resume(&self) {
        self.signal(Signal::CONT).await;
    }

    /// Sends SIGKILL, and returns when the process has ended.
    ///
    /// # Panics
    /// When it does not end in time.
    pub async fn kill(&self) {
        let Some(mut child) = self.child.lock().await.take() else { return };
        supervisor::signal(child.id(), Signal::KILL);
        if let Err(error) = supervisor::ended("Redis to end", &mut child).await {
            panic!("killing Redis: {error}");
        }
    }

    /// Starts a killed server on its port: empty, or with the data of the last `SAVE`.
    ///
    /// # Panics
    /// When it does not start, with its log.
    pub async fn start_again(&self) {
        let mut child = self.child.lock().await;
        assert!(child.is_none(), "the server runs already");
        let command = command(&self.supervisor, &self.settings, self.port);
        match launch::restart(&self.supervisor, command, ready).await {
            Ok(started) => *child = Some(started),
            Err(error) => panic!("starting Redis again: {error}"),
        }
    }

    /// Deletes everything.
    ///
    /// # Panics
    /// When the server cannot be reached.
    pub async fn flush_all(&self) {
        let reply = self.command(&["FLUSHALL"]).await;
        assert_eq!(reply, RedisReply::Text(b"OK".to_vec()));
    }

    /// Runs one command on a new connection. The arguments of the command are any bytes.
    ///
    /// # Panics
    /// When the server cannot be reached. An error of the server is a reply.
    pub async fn command(&self, words: &[impl AsRef<[u8]>]) -> RedisReply {
        match ask(self.port, words).await {
            Ok(reply) => reply,
            Err(error) => panic!("asking Redis: {error}"),
        }
    }

    async fn open(settings: &[(&str, &str)]) -> io::Result<Redis> {
        let supervisor = Supervisor::new("redis", "TERM")?;
        let settings: Vec<_> = settings
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect();
        let launched = launch::on_a_free_port(
            &supervisor,
            |port| Ok(command(&supervisor, &settings, port)),
            ready,
        )
        .await?;
        let child = Mutex::new(Some(launched.child));
        Ok(Redis { child, supervisor, settings, port: launched.port })
    }

    async fn signal(&self, signal: Signal) {
        if let Some(child) = self.child.lock().await.as_ref() {
            supervisor::signal(child.id(), signal);
        }
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.get_mut().take() {
            // SIGKILL loses nothing that is needed, and a paused server reacts to no other signal.
            supervisor::signal(child.id(), Signal::KILL);
            let _ = child.wait();
        }
    }
}

fn command(supervisor: &Supervisor, settings: &[(String, String)], port: u16) -> Command {
    let mut command = supervisor.command("redis-server");
    command.args(["--bind", "127.0.0.1", "--port", &port.to_string()]);
    command.args(["--save", "", "--appendonly", "no", "--dir"]).arg(supervisor.folder());
    for (name, value) in settings {
        command.arg(format!("--{name}")).arg(value);
    }
    command
}

fn ready(_: u32, logged: &str) -> bool {
    logged.contains("Ready to accept connections")
}

async fn ask(port: u16, words: &[impl AsRef<[u8]>]) -> io::Result<RedisReply> {
    let mut stream = BufReader::new(TcpStream::connect(("127.0.0.1", port)).await?);
    let mut request = format!("*{}\r\n", words.len()).into_bytes();
    for word in words {
        let word = word.as_ref();
        request.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
        request.extend_from_slice(word);
        request.extend_from_slice(b"\r\n");
    }
    stream.write_all(&request).await?;
    read(&mut stream).await
}

async fn read(stream: &mut BufReader<TcpStream>) -> io::Result<RedisReply> {
    let mut line = String::new();
    stream.read_line(&mut line).await?;
    let line = line.trim_end();
    let (kind, rest) = line.split_at_checked(1).ok_or(io::ErrorKind::UnexpectedEof)?;
    match kind {
        "+" => Ok(RedisReply::Text(rest.as_bytes().to_vec())),
        "-" => Ok(RedisReply::Refused(rest.to_owned())),
        ":" => Ok(RedisReply::Integer(number(rest)?)),
        "$" => {
            let Ok(length) = usize::try_from(number(rest)?) else { return Ok(RedisReply::Nothing) };
            let mut value = vec![0; length + 2];
            stream.read_exact(&mut value).await?;
            value.truncate(length);
            Ok(RedisReply::Text(value))
        }
        "*" => {
            let Ok(length) = usize::try_from(number(rest)?) else { return Ok(RedisReply::Nothing) };
            let mut replies = Vec::new();
            for _ in 0..length {
                replies.push(Box::pin(read(stream)).await?);
            }
            Ok(RedisReply::List(replies))
        }
        _ => Err(io::Error::other(format!("not an answer of Redis: {line}"))),
    }
}

fn number(digits: &str) -> io::Result<i64> {
    digits.parse().map_err(io::Error::other)
}
