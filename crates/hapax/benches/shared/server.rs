//! The servers under load, each in its own process, and their resource usage from the kernel.

use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};

use anyhow::{Context as _, bail};

use super::events::SECRET;

/// A running server; it is killed when dropped.
pub(crate) struct Server {
    child: Running,
    address: SocketAddr,
    /// Hapax's admin address.
    admin: Option<SocketAddr>,
    decides: bool,
    /// The standard output, kept open so that later output does not fail.
    _said: BufReader<ChildStdout>,
}

struct Running(Child);

/// The part of the config that follows the addresses, the directory and the source.
#[derive(Default)]
pub(crate) struct Setup {
    /// Keys of the root.
    pub(crate) root: String,
    /// Tables: handlers, retention.
    pub(crate) tables: String,
}

/// The resources that a process has used.
#[derive(Clone, Copy, Default)]
pub(crate) struct Usage {
    pub(crate) cpu_seconds: f64,
    pub(crate) resident_bytes: u64,
    pub(crate) resident_bytes_peak: u64,
    /// Bytes that the process caused to be written to a disk.
    pub(crate) written_bytes: u64,
}

impl Usage {
    /// The usage of all of them together.
    pub(crate) fn of(servers: &[&Server]) -> anyhow::Result<Self> {
        let mut all = Self::default();
        for server in servers {
            let one = server.usage()?;
            all.cpu_seconds += one.cpu_seconds;
            all.resident_bytes += one.resident_bytes;
            all.resident_bytes_peak += one.resident_bytes_peak;
            all.written_bytes += one.written_bytes;
        }
        Ok(all)
    }
}

/// The kernel reports CPU time in hundredths of a second, whatever it uses inside.
const TICKS_PER_SECOND: f64 = 100.0;

impl Server {
    /// This program again, as the floor.
    pub(crate) fn floor() -> anyhow::Result<Self> {
        Self::ourselves(&["--floor"])
    }

    /// This program again, with other `arguments`.
    pub(crate) fn ourselves(arguments: &[&str]) -> anyhow::Result<Self> {
        let mut command = Command::new(std::env::current_exe().context("finding ourselves")?);
        command.args(arguments).stderr(Stdio::inherit());
        Self::start(command)
    }

    /// The real binary with its own data directory, and a config as a user would write it.
    pub(crate) fn hapax(binary: &Path, directory: &Path, setup: &Setup) -> anyhow::Result<Self> {
        Self::configured(binary, directory, setup).map(Self::that_decides)
    }

    /// The same as a proxy in front of `upstream`: its address is the proxy's, which is printed
    /// first.
    pub(crate) fn proxy(
        binary: &Path,
        directory: &Path,
        upstream: &Self,
        root: String,
    ) -> anyhow::Result<Self> {
        let tables = format!(
            "[proxies.api]\nlisten = \"127.0.0.1:0\"\nupstream = \"http://{}\"\n",
            upstream.address
        );
        Self::configured(binary, directory, &Setup { root, tables })
    }

    fn configured(binary: &Path, directory: &Path, setup: &Setup) -> anyhow::Result<Self> {
        std::fs::create_dir_all(directory).context("making the data directory")?;
        let config = directory.join("hapax.toml");
        let text = format!(
            "listen = \"127.0.0.1:0\"\nadmin_listen = \"127.0.0.1:0\"\n\
             admin_open = true\ndata_dir = {:?}\n{}\n\
             [sources.stripe]\nprovider = \"stripe\"\nsecrets = [{SECRET:?}]\n{}\n",
            directory.join("data"),
            setup.root,
            setup.tables,
        );
        std::fs::write(&config, text).context("writing the config")?;
        let log = std::fs::File::create(directory.join("hapax.log")).context("making the log")?;
        let mut command = Command::new(binary);
        command.arg("serve").arg("--config").arg(&config).stderr(log);
        Self::start(command).with_context(|| {
            let log = std::fs::read_to_string(directory.join("hapax.log")).unwrap_or_default();
            format!("starting {}\n{log}", binary.display())
        })
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Marks a server whose answers name decisions as those of Hapax do, so that they are checked.
    pub(crate) fn that_decides(self) -> Self {
        Self { decides: true, ..self }
    }

    pub(crate) fn admin(&self) -> anyhow::Result<SocketAddr> {
        self.admin.context("a server without an admin side")
    }

    /// Whether its answers say if an event was new.
    pub(crate) fn decides(&self) -> bool {
        self.decides
    }

    pub(crate) fn usage(&self) -> anyhow::Result<Usage> {
        let read = |what| {
            let path = format!("/proc/{}/{what}", self.child.0.id());
            std::fs::read_to_string(&path).with_context(|| format!("reading {path}"))
        };
        let status = read("status")?;
        let kibibytes = |field: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(field));
            let number = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
            number.with_context(|| format!("no {field} in the process status"))
        };
        let io = read("io")?;
        let written = io.lines().find_map(|line| line.strip_prefix("write_bytes: "));
        Ok(Usage {
            cpu_seconds: Stat::parse(&read("stat")?).cpu_seconds,
            resident_bytes: kibibytes("VmRSS:")? * 1024,
            resident_bytes_peak: kibibytes("VmHWM:")? * 1024,
            written_bytes: written.and_then(|bytes| bytes.parse().ok()).unwrap_or(0),
        })
    }

    fn start(mut command: Command) -> anyhow::Result<Self> {
        let mut child = command.stdout(Stdio::piped()).spawn()?;
        let mut said = BufReader::new(child.stdout.take().context("its stdout is piped")?);
        let mut line = String::new();
        said.read_line(&mut line)?;
        let mut addresses = line
            .split_whitespace()
            .filter_map(|word| word.strip_prefix("http://"))
            .filter_map(|address| address.parse().ok());
        match addresses.next() {
            Some(address) => {
                let admin = addresses.next();
                Ok(Self { child: Running(child), address, admin, decides: false, _said: said })
            }
            None => {
                let _ = child.kill();
                let _ = child.wait();
                bail!("it did not say where it listens: {line:?}")
            }
        }
    }
}

/// CPU time of a process and its children, those that have ended included.
pub(crate) fn cpu_seconds_of_family(parent: u32) -> anyhow::Result<f64> {
    let mut all = 0.0;
    for entry in std::fs::read_dir("/proc").context("listing processes")? {
        let path = entry?.path().join("stat");
        // A process may end while the list is read.
        let Ok(text) = std::fs::read_to_string(&path) else { continue };
        let stat = Stat::parse(&text);
        if path.starts_with(format!("/proc/{parent}")) {
            all += stat.cpu_seconds + stat.ended_children_cpu_seconds;
        } else if stat.parent == parent {
            all += stat.cpu_seconds;
        }
    }
    Ok(all)
}

/// The fields of `/proc/PID/stat` that benches use.
struct Stat {
    parent: u32,
    cpu_seconds: f64,
    ended_children_cpu_seconds: f64,
}

impl Stat {
    fn parse(text: &str) -> Self {
        // The program's name, in brackets, may contain anything; the fields after it are numbers.
        let fields = text.rsplit_once(')').map_or("", |(_, fields)| fields);
        let fields: Vec<u64> =
            fields.split_whitespace().map(|field| field.parse().unwrap_or(0)).collect();
        let at = |place: usize| fields.get(place).copied().unwrap_or(0);
        let seconds = |first: usize| (at(first) + at(first + 1)) as f64 / TICKS_PER_SECOND;
        Self {
            parent: u32::try_from(at(1)).unwrap_or(0),
            cpu_seconds: seconds(11),
            ended_children_cpu_seconds: seconds(13),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
