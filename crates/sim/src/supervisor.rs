//! Owns the private directory of an engine, the user that it runs as, and the guarantee that engine and
//! directory are gone when this process has ended. The supervisor knows no particular engine.
//!
//! A watchdog gives the guarantee: a shell that reads from a pipe whose other end only this process holds.
//! When this process drops it, panics or is killed, the pipe ends, and the shell ends every process whose
//! working directory is in the directory. (A parent-death signal would fire when the *thread* that started
//! the engine ends, and a test's thread ends long before a shared server may.)

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};

/// How long any step of an engine may take before the test fails: long enough for a loaded machine, and
/// bounded, so that a hang is found.
pub(crate) const ENGINE_TIMEOUT: Duration = Duration::from_secs(120);

/// How often a condition without a signal is polled.
pub(crate) const POLL: Duration = Duration::from_millis(5);

/// A private directory, and the watchdog that ends the processes in it. It lies in the directory that
/// `HAPAX_TEST_ENGINES` names, else among the temporary files.
pub(crate) struct Supervisor {
    folder: PathBuf,
    user: Option<EngineUser>,
    watchdog: Child,
}

/// The user that engines run as if this process is root, since PostgreSQL refuses to run as root.
#[derive(Clone, Copy)]
struct EngineUser {
    uid: u32,
    gid: u32,
}

/// The script of the watchdog. After the end of the pipe it sends the engine's own signal for two seconds,
/// and then SIGKILL. The directory is removed last: an engine that still writes into it would leave files.
const WATCHDOG: &str = r#"
trap '' INT TERM HUP
while read -r line; do :; done
round=0
while [ "$round" -lt 200 ]; do
    living=$(find /proc/[0-9]*/cwd -maxdepth 0 '(' -lname "$1" -o -lname "$1/*" ')' 2>/dev/null)
    [ -n "$living" ] || break
    signal=$2
    [ "$round" -lt 40 ] || signal=KILL
    for process in $living; do
        process=${process#/proc/}
        kill -s "$signal" "${process%/cwd}" 2>/dev/null
    done
    sleep 0.05
    round=$((round + 1))
done
rm -rf "$1"
"#;

impl Supervisor {
    /// A new directory for the engine `name`, which exits on the signal `ending`.
    pub(crate) fn new(name: &str, ending: &str) -> io::Result<Supervisor> {
        let user = EngineUser::when_root()?;
        let parent =
            std::env::var_os("HAPAX_TEST_ENGINES").map_or_else(std::env::temp_dir, PathBuf::from);
        // The real path, since the watchdog compares it with /proc.
        let folder = tempfile::Builder::new()
            .prefix(&format!("hapax-{name}-"))
            .permissions(fs::Permissions::from_mode(0o700))
            .tempdir_in(parent)?
            .keep()
            .canonicalize()?;
        if let Some(user) = user {
            chown(&folder, Some(user.uid), Some(user.gid))?;
        }
        let mut watchdog = Command::new("sh");
        watchdog
            .args(["-c", WATCHDOG, "watchdog"])
            .arg(&folder)
            .arg(ending)
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        // The watchdog runs as the engine's user: in a container, root without capabilities cannot
        // see that user's processes.
        EngineUser::apply(user, &mut watchdog);
        let watchdog = watchdog.spawn()?;
        Ok(Supervisor { folder, user, watchdog })
    }

    /// The private directory.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// A command that runs in the directory as the engine's user, without this terminal and this
    /// process's environment.
    pub(crate) fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        command.env_clear().env("PATH", path()).env("LC_ALL", "C").env("TZ", "UTC");
        command.current_dir(&self.folder).stdin(Stdio::null());
        EngineUser::apply(self.user, &mut command);
        command
    }

    /// Writes a file that only the engine's user can read.
    pub(crate) fn write(&self, path: &Path, content: &str) -> io::Result<()> {
        use std::io::Write;
        use std::os::unix::fs::OpenOptionsExt;
        let mut file = fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(path)?;
        file.write_all(content.as_bytes())?;
        match self.user {
            Some(user) => chown(path, Some(user.uid), Some(user.gid)),
            None => Ok(()),
        }
    }

    /// Runs a command to its end. Its stderr is the error.
    pub(crate) async fn run(&self, command: Command) -> io::Result<()> {
        let output = tokio::process::Command::from(command).output().await?;
        if output.status.success() {
            return Ok(());
        }
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        Err(io::Error::other(format!("{}: {text}", output.status)))
    }

    /// Starts the engine. Its output goes to `log`, and not to a pipe of this process: a reader of that pipe
    /// would wait for the engine's end.
    pub(crate) fn spawn(&self, mut command: Command, log: &Path) -> io::Result<Child> {
        let log = fs::OpenOptions::new().create(true).append(true).open(log)?;
        command.stdout(log.try_clone()?).stderr(log);
        command.spawn()
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        drop(self.watchdog.stdin.take());
        // An error cannot be reported from a destructor; the watchdog bounds its own time.
        let _ = self.watchdog.wait();
    }
}

/// The search path of this process, and the directories where Debian installs engines for root.
pub(crate) fn path() -> OsString {
    let mut path = std::env::var_os("PATH").unwrap_or_default();
    path.push(":/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
    path
}

impl EngineUser {
    fn when_root() -> io::Result<Option<EngineUser>> {
        if !rustix::process::geteuid().is_root() {
            return Ok(None);
        }
        let users = fs::read_to_string("/etc/passwd")?;
        let user =
            EngineUser::named(&users, "postgres").or_else(|| EngineUser::named(&users, "nobody"));
        user.map(Some).ok_or_else(|| io::Error::other("neither user postgres nor nobody exists"))
    }

    fn named(users: &str, name: &str) -> Option<EngineUser> {
        let line = users.lines().find(|line| line.split(':').next() == Some(name))?;
        let mut numbers = line.split(':').skip(2);
        let uid = numbers.next()?.parse().ok()?;
        let gid = numbers.next()?.parse().ok()?;
        Some(EngineUser { uid, gid })
    }

    /// Sets the user, and a new process group, so that Ctrl-C reaches only the tests.
    fn apply(user: Option<EngineUser>, command: &mut Command) {
        command.process_group(0);
        if let Some(user) = user {
            command.uid(user.uid).gid(user.gid);
        }
    }
}

/// Signals one process. It is not an error if the process has ended.
pub(crate) fn signal(pid: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        let _ = rustix::process::kill_process(pid, signal);
    }
}

/// The children of a process.
pub(crate) fn children(parent: u32) -> Vec<u32> {
    let Ok(processes) = fs::read_dir("/proc") else { return Vec::new() };
    processes
        .flatten()
        .filter_map(|process| process.file_name().to_str()?.parse().ok())
        .filter(|pid| stat(*pid).is_some_and(|(_, its_parent)| its_parent == parent))
        .collect()
}

/// Whether a process runs, and is not a zombie.
pub(crate) fn is_alive(pid: u32) -> bool {
    stat(pid).is_some_and(|(state, _)| !matches!(state, "Z" | "X"))
}

/// State and parent. The process name before these fields may contain parentheses, so the last
/// parenthesis ends it.
fn stat(pid: u32) -> Option<(&'static str, u32)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = match fields.next()? {
        "Z" => "Z",
        "X" => "X",
        _ => "alive",
    };
    Some((state, fields.next()?.parse().ok()?))
}

/// Polls until `done` returns a value, for at most [`ENGINE_TIMEOUT`].
pub(crate) async fn wait_for<T>(
    what: &str,
    mut done: impl FnMut() -> io::Result<Option<T>>,
) -> io::Result<T> {
    let deadline = Instant::now() + ENGINE_TIMEOUT;
    loop {
        if let Some(answer) = done()? {
            return Ok(answer);
        }
        if Instant::now() > deadline {
            return Err(io::Error::new(io::ErrorKind::TimedOut, format!("waiting for {what}")));
        }
        tokio::time::sleep(POLL).await;
    }
}

/// Waits until a child has ended, and reaps it.
pub(crate) async fn ended(what: &str, child: &mut Child) -> io::Result<()> {
    wait_for(what, || Ok(child.try_wait()?.map(|_| ()))).await
}

/// Waits for a child that was signalled to end, without a runtime. Kills it if it does not end.
pub(crate) fn reap(child: &mut Child) -> io::Result<()> {
    let deadline = Instant::now() + ENGINE_TIMEOUT / 24;
    while child.try_wait()?.is_none() {
        if Instant::now() > deadline {
            child.kill()?;
        }
        std::thread::sleep(POLL);
    }
    Ok(())
}

/// An error with all its causes. The outer error of a database client is only "db error".
pub(crate) fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        text.push_str(&format!(": {inner}"));
        cause = inner.source();
    }
    text
}
