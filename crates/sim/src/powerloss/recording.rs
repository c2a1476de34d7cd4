//! Reads a log of strace: the system calls that change files, and the bytes sent on sockets.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// The system calls that change files, sync them, or send answers. Other ways to change a file, such as a shared
/// mapping, are not recorded. SQLite maps only its `-shm` file, which is rebuilt after a crash.
const CALLS: &str = "trace=open,openat,creat,mkdir,mkdirat,pwrite64,pwritev,pwritev2,write,writev,\
    sendto,sendmsg,fdatasync,fsync,ftruncate,truncate,fallocate,rename,renameat,renameat2,link,\
    linkat,unlink,unlinkat,rmdir,copy_file_range,sync_file_range,msync";

/// strace truncates longer strings; no write of Hapax is as long.
const STRING_BYTES_MAX: &str = "8388608";

/// One step, in the order of strace. A call that takes time is two steps: its change may be on disk once it has
/// begun, and a sync covers the changes that had ended before it began.
#[derive(Debug)]
pub enum DiskStep {
    /// A file was created.
    Create(PathBuf),
    /// A directory was created.
    CreateDir(PathBuf),
    /// A name was removed.
    Remove(PathBuf),
    /// A file or directory was renamed.
    Rename(PathBuf, PathBuf),
    /// A file got a second name.
    Link(PathBuf, PathBuf),
    /// A write began.
    Write {
        /// The file.
        path: PathBuf,
        /// The offset.
        offset: u64,
        /// The bytes.
        bytes: Vec<u8>,
    },
    /// A change of the size of a file began.
    Resize {
        /// The file.
        path: PathBuf,
        /// Its new size.
        size: u64,
    },
    /// A sync of a file or directory began.
    Sync(PathBuf),
    /// A change or sync has ended.
    Ended {
        /// The step in which it began.
        step: usize,
        /// The number of bytes written, or zero; or the error.
        result: Result<u64, String>,
    },
    /// Bytes were sent on a socket.
    Send(Vec<u8>),
}

/// A whole run.
#[derive(Debug, Default)]
pub struct Recording {
    steps: Vec<DiskStep>,
}

impl Recording {
    /// The arguments of strace that record a command to `log`. The caller appends the command, which stays
    /// the direct child of the caller. `fault` is an injection in the syntax of strace.
    pub fn arguments(log: &Path, fault: Option<&str>) -> Vec<String> {
        let mut arguments: Vec<String> =
            ["-D", "-f", "-y", "-xx", "-s", STRING_BYTES_MAX, "-e", CALLS, "-e", "signal=none"]
                .map(str::to_owned)
                .to_vec();
        if let Some(fault) = fault {
            arguments.extend(["-e".to_owned(), format!("inject={fault}")]);
        }
        arguments.extend(["-o".to_owned(), log.display().to_string()]);
        arguments
    }

    /// Reads a log: the changes of files below `root`, and everything that was sent.
    ///
    /// # Panics
    /// When the log contains a call that this model does not know.
    pub fn read(log: &Path, root: &Path) -> Self {
        let text = std::fs::read_to_string(log).expect("strace has written a log");
        let mut reader = Reader { root, recording: Self::default(), begun: HashMap::new() };
        let mut offsets = HashMap::new();
        for line in text.lines() {
            reader.line(line, &mut offsets);
        }
        assert!(!reader.recording.steps.is_empty(), "nothing was recorded");
        reader.recording
    }

    /// All steps.
    pub fn steps(&self) -> &[DiskStep] {
        &self.steps
    }
}

struct Reader<'a> {
    root: &'a Path,
    recording: Recording,
    /// The unfinished call of each thread: its text, and its step, if it has one.
    begun: HashMap<&'a str, (String, Option<usize>)>,
}

impl<'a> Reader<'a> {
    fn line<'l: 'a>(&mut self, line: &'l str, offsets: &mut HashMap<u64, u64>) {
        let Some((thread, rest)) = line.split_once(' ') else { return };
        let rest = rest.trim_start();
        if rest.starts_with("+++") || rest.starts_with("---") {
            return;
        }
        if let Some(resumed) = rest.strip_prefix("<... ") {
            let Some((call, step)) = self.begun.remove(thread) else { return };
            let end = resumed.split_once(" resumed>").map_or("", |(_, end)| end);
            self.ended(&TracedCall::parse(&format!("{call}{end}")), step, offsets);
        } else if let Some(call) = rest.strip_suffix(" <unfinished ...>") {
            let step = self.began(&TracedCall::parse(call), offsets);
            self.begun.insert(thread, (call.to_owned(), step));
        } else {
            let call = TracedCall::parse(rest);
            let step = self.began(&call, offsets);
            self.ended(&call, step, offsets);
        }
    }

    /// Records a call that takes effect when it begins.
    fn began(&mut self, call: &TracedCall<'_>, offsets: &mut HashMap<u64, u64>) -> Option<usize> {
        let step = match call.name {
            "write" | "sendto" | "sendmsg" | "writev" if call.is_socket() => {
                DiskStep::Send(call.strings())
            }
            "pwrite64" => DiskStep::Write {
                path: self.mine(call.path(0))?,
                offset: call.number(3),
                bytes: call.strings(),
            },
            "write" => {
                let path = self.mine(call.path(0))?;
                let bytes = call.strings();
                let offset = offsets.entry(call.descriptor()).or_default();
                let at = *offset;
                *offset += bytes.len() as u64;
                DiskStep::Write { path, offset: at, bytes }
            }
            "ftruncate" => {
                DiskStep::Resize { path: self.mine(call.path(0))?, size: call.number(1) }
            }
            "fsync" | "fdatasync" => DiskStep::Sync(self.mine(call.path(0))?),
            "writev" | "pwritev" | "pwritev2" | "truncate" | "fallocate" | "copy_file_range"
            | "sync_file_range" | "msync" | "renameat" | "renameat2" | "mkdirat" | "rmdir"
            | "creat" => {
                let mine = call.args.iter().any(|arg| {
                    decoded(arg).is_some_and(|path| self.mine(Some(path.into())).is_some())
                });
                assert!(!mine, "a call that this model does not know: {}", call.name);
                return None;
            }
            _ => return None,
        };
        self.recording.steps.push(step);
        Some(self.recording.steps.len() - 1)
    }

    /// Records a call that takes effect when it ends.
    fn ended(
        &mut self,
        call: &TracedCall<'_>,
        step: Option<usize>,
        offsets: &mut HashMap<u64, u64>,
    ) {
        if let Some(step) = step {
            if !matches!(self.recording.steps[step], DiskStep::Send(_)) {
                let result = call.result.clone();
                self.recording.steps.push(DiskStep::Ended { step, result });
            }
            return;
        }
        if call.result.is_err() {
            return;
        }
        let step = match call.name {
            "open" | "openat" => {
                if let Ok(descriptor) = call.result {
                    offsets.insert(descriptor, 0);
                }
                let at = usize::from(call.name == "openat");
                let flags = call.args.get(at + 1).copied().unwrap_or_default();
                assert!(!flags.contains("O_APPEND") || self.mine(call.path(at)).is_none());
                if !flags.contains("O_CREAT") && !flags.contains("O_TRUNC") {
                    return;
                }
                self.mine(call.path(at)).map(DiskStep::Create)
            }
            "mkdir" => self.mine(call.path(0)).map(DiskStep::CreateDir),
            "unlink" => self.mine(call.path(0)).map(DiskStep::Remove),
            "unlinkat" => self.mine(call.path(1)).map(DiskStep::Remove),
            "rename" => self.both(call, [0, 1]).map(|(from, to)| DiskStep::Rename(from, to)),
            "link" => self.both(call, [0, 1]).map(|(from, to)| DiskStep::Link(from, to)),
            "linkat" => self.both(call, [1, 3]).map(|(from, to)| DiskStep::Link(from, to)),
            _ => None,
        };
        self.recording.steps.extend(step);
    }

    /// The two paths of a call, if they are recorded.
    fn both(&self, call: &TracedCall<'_>, at: [usize; 2]) -> Option<(PathBuf, PathBuf)> {
        match at.map(|at| self.mine(call.path(at))) {
            [Some(from), Some(to)] => Some((from, to)),
            [None, None] => None,
            [_, _] => panic!("a name left the recorded directory"),
        }
    }

    /// The path if it is recorded. The mapped index of the log is not: it is rebuilt from the log.
    fn mine(&self, path: Option<PathBuf>) -> Option<PathBuf> {
        let path = path?;
        let shared_memory = path.as_os_str().to_string_lossy().ends_with("-shm");
        (path.starts_with(self.root) && !shared_memory).then_some(path)
    }
}

/// One call as strace shows it.
struct TracedCall<'t> {
    name: &'t str,
    args: Vec<&'t str>,
    result: Result<u64, String>,
}

impl<'t> TracedCall<'t> {
    fn parse(text: &'t str) -> Self {
        let (name, rest) = text.split_once('(').unwrap_or((text, ""));
        // Strings are shown in hex, so a bracket in a string cannot be mistaken for the bracket
        // that ends the arguments.
        let ends = rest.rmatch_indices(')').find_map(|(at, _)| {
            let result = rest[at + 1..].trim_start().strip_prefix("= ")?;
            Some((&rest[..at], result))
        });
        // A call that has begun and not ended has no result yet.
        let (args, result) = ends.unwrap_or((rest, ""));
        let digits = result.find(|char: char| !char.is_ascii_digit()).unwrap_or(result.len());
        let result = result[..digits].parse().map_err(|_| result.to_owned());
        Self { name, args: split(args), result }
    }

    fn number(&self, at: usize) -> u64 {
        self.args[at].parse().expect("a number")
    }

    fn descriptor(&self) -> u64 {
        self.args[0].split('<').next().and_then(|number| number.parse().ok()).expect("a descriptor")
    }

    /// The path of an argument: of a descriptor, or a name that begins at the root.
    fn path(&self, at: usize) -> Option<PathBuf> {
        self.args.get(at).and_then(|arg| decoded(arg)).map(PathBuf::from)
    }

    fn is_socket(&self) -> bool {
        self.args.first().and_then(|arg| decoded(arg)).is_some_and(|path| {
            path.starts_with("socket:") || path.starts_with("TCP") || path.starts_with("UNIX")
        })
    }

    /// The bytes of every string after the descriptor, in order.
    fn strings(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for arg in &self.args[1..] {
            let mut parts = arg.split('"');
            while let (Some(_), Some(string)) = (parts.next(), parts.next()) {
                unescape(string, &mut bytes);
            }
            assert!(!arg.contains("\"..."), "a string was cut off");
        }
        bytes
    }
}

/// Splits arguments at commas outside of strings and brackets.
fn split(args: &str) -> Vec<&str> {
    let (mut parts, mut from, mut depth, mut quoted) = (Vec::new(), 0, 0usize, false);
    for (at, byte) in args.bytes().enumerate() {
        match byte {
            b'"' => quoted = !quoted,
            b'[' | b'{' if !quoted => depth += 1,
            b']' | b'}' if !quoted => depth = depth.saturating_sub(1),
            b',' if !quoted && depth == 0 => {
                parts.push(args[from..at].trim());
                from = at + 1;
            }
            _ => {}
        }
    }
    parts.push(args[from..].trim());
    parts
}

/// The text in `"…"` or `N<…>`, unescaped.
fn decoded(arg: &str) -> Option<String> {
    let inner = match arg.strip_prefix('"') {
        Some(rest) => rest.strip_suffix('"')?,
        None => arg.split_once('<')?.1.strip_suffix('>')?,
    };
    let mut bytes = Vec::new();
    unescape(inner, &mut bytes);
    String::from_utf8(bytes).ok()
}

/// `\x41B` as bytes.
fn unescape(text: &str, into: &mut Vec<u8>) {
    let text = text.as_bytes();
    let digit = |at: usize| char::from(text[at]).to_digit(16).expect("two hex digits") as u8;
    let mut at = 0;
    while at < text.len() {
        if text[at..].starts_with(b"\\x") {
            into.push(digit(at + 2) << 4 | digit(at + 3));
            at += 4;
        } else {
            into.push(text[at]);
            at += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_becomes_steps_and_a_sync_that_others_interrupt_ends_where_it_ended() {
        let dir = tempfile::tempdir().expect("a directory");
        let log = dir.path().join("log");
        std::fs::write(
            &log,
            r#"1 openat(AT_FDCWD</>, "\x2f\x64\x2f\x61", O_RDWR|O_CREAT, 0644) = 5<\x2f\x64\x2f\x61>
1 openat(AT_FDCWD</>, "\x2f\x65\x2f\x61", O_RDWR|O_CREAT, 0644) = 6<\x2f\x65\x2f\x61>
1 pwrite64(5<\x2f\x64\x2f\x61>, "\x41\x2c\x42", 3, 512) = 3
1 fdatasync(5<\x2f\x64\x2f\x61> <unfinished ...>
2 sendto(9<socket:[77]>, "\x6f\x6b", 2, MSG_NOSIGNAL, NULL, 0) = 2
1 <... fdatasync resumed>)              = -1 EIO (Input/output error) (INJECTED)
2 writev(9<socket:[77]>, [{iov_base="\x61", iov_len=1}, {iov_base="\x62", iov_len=1}], 2) = 2
2 +++ exited with 0 +++
"#,
        )
        .expect("written");
        let recording = Recording::read(&log, Path::new("/d"));
        let shown: Vec<String> = recording.steps().iter().map(|step| format!("{step:?}")).collect();
        let expected = [
            r#"Create("/d/a")"#,
            r#"Write { path: "/d/a", offset: 512, bytes: [65, 44, 66] }"#,
            "Ended { step: 1, result: Ok(3) }",
            r#"Sync("/d/a")"#,
            "Send([111, 107])",
            r#"Ended { step: 3, result: Err("-1 EIO (Input/output error) (INJECTED)") }"#,
            "Send([97, 98])",
        ];
        assert_eq!(shown, expected);
    }
}
