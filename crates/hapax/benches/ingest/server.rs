//! The two servers under load, each a process of its own, and what the kernel says of them.

use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};

use anyhow::{Context as _, bail};

use crate::events::SECRET;

/// A running server; dropped, it is killed.
pub(crate) struct Server {
    child: Child,
    address: SocketAddr,
    is_floor: bool,
    /// Held so that what it says later does not meet a closed pipe.
    _said: BufReader<ChildStdout>,
}

/// What a process has used.
#[derive(Clone, Copy, Default)]
pub(crate) struct Usage {
    pub(crate) cpu_seconds: f64,
    pub(crate) resident_bytes: u64,
    pub(crate) resident_bytes_peak: u64,
}

/// The kernel counts CPU time for others in hundredths of a second, whatever it uses inside.
const TICKS_PER_SECOND: f64 = 100.0;

impl Server {
    /// This program once more, as the floor.
    pub(crate) fn floor() -> anyhow::Result<Self> {
        let mut command = Command::new(std::env::current_exe().context("finding the floor")?);
        command.arg("--floor").stderr(Stdio::inherit());
        Self::start(command, true)
    }

    /// The real thing over an empty data directory, with a config as a user would write it.
    pub(crate) fn hapax(binary: &Path, directory: &Path) -> anyhow::Result<Self> {
        std::fs::create_dir_all(directory).context("making the data directory")?;
        let config = directory.join("hapax.toml");
        let text = format!(
            "listen = \"127.0.0.1:0\"\nadmin_listen = \"127.0.0.1:0\"\ndata_dir = {:?}\n\n\
             [sources.stripe]\nprovider = \"stripe\"\nsecrets = [{SECRET:?}]\n",
            directory.join("data"),
        );
        std::fs::write(&config, text).context("writing the config")?;
        let log = std::fs::File::create(directory.join("hapax.log")).context("making the log")?;
        let mut command = Command::new(binary);
        command.arg("serve").arg("--config").arg(&config).stderr(log);
        Self::start(command, false).with_context(|| {
            let log = std::fs::read_to_string(directory.join("hapax.log")).unwrap_or_default();
            format!("starting {}\n{log}", binary.display())
        })
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Whether it keeps nothing, and so cannot say what is new.
    pub(crate) fn is_floor(&self) -> bool {
        self.is_floor
    }

    pub(crate) fn usage(&self) -> anyhow::Result<Usage> {
        let read = |what| {
            let path = format!("/proc/{}/{what}", self.child.id());
            std::fs::read_to_string(&path).with_context(|| format!("reading {path}"))
        };
        let status = read("status")?;
        let kibibytes = |field: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(field));
            let number = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
            number.with_context(|| format!("no {field} in the process status"))
        };
        let stat = read("stat")?;
        // The program's name, in brackets, may hold anything; what follows it is numbers.
        let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
        let ticks = fields.split_whitespace().skip(11).take(2);
        let ticks: u64 = ticks.filter_map(|field| field.parse::<u64>().ok()).sum();
        Ok(Usage {
            cpu_seconds: ticks as f64 / TICKS_PER_SECOND,
            resident_bytes: kibibytes("VmRSS:")? * 1024,
            resident_bytes_peak: kibibytes("VmHWM:")? * 1024,
        })
    }

    fn start(mut command: Command, is_floor: bool) -> anyhow::Result<Self> {
        let mut child = command.stdout(Stdio::piped()).spawn()?;
        let mut said = BufReader::new(child.stdout.take().context("its stdout is piped")?);
        let mut line = String::new();
        said.read_line(&mut line)?;
        let address = line
            .split_whitespace()
            .find_map(|word| word.strip_prefix("http://"))
            .and_then(|address| address.parse().ok());
        match address {
            Some(address) => Ok(Self { child, address, is_floor, _said: said }),
            None => {
                let _ = child.kill();
                let _ = child.wait();
                bail!("it did not say where it listens: {line:?}")
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
