//! Node apps with packages from the npm registry. The packages are installed into a separate directory,
//! because the repository contains only their lock files.

use std::path::Path;
use std::process::Command;

/// Far longer than the installation of a few packages takes.
const SECONDS_MAX: &str = "120";

/// Installs the files of an example and its packages into `folder`. Returns an error if the
/// packages cannot be fetched here. Panics if the lock file does not match, because that is a
/// defect of the example.
pub(crate) fn install(example: &Path, folder: &Path) -> Result<(), String> {
    std::fs::create_dir_all(folder).unwrap();
    for entry in std::fs::read_dir(example).unwrap() {
        let file = entry.unwrap();
        if file.file_type().unwrap().is_file() {
            std::fs::copy(file.path(), folder.join(file.file_name())).unwrap();
        }
    }
    // A registry that accepts the request and never answers must not block the tests.
    let npm = Command::new("timeout")
        .args(["--kill-after=10", SECONDS_MAX, "npm", "ci"])
        .args(["--no-audit", "--no-fund", "--loglevel=error", "--prefer-offline"])
        .args(["--fetch-retries=1", "--fetch-timeout=30000"])
        .current_dir(folder)
        .output();
    match npm {
        Ok(ran) if matches!(ran.status.code(), Some(124 | 137)) => {
            Err(format!("npm ci took longer than {SECONDS_MAX} s"))
        }
        Ok(ran) if ran.status.code() == Some(127) => Err("npm is not installed".to_owned()),
        Ok(ran) if ran.status.success() => Ok(()),
        Ok(ran) => {
            let why = String::from_utf8_lossy(&ran.stderr);
            let is_ours =
                ["EUSAGE", "EINTEGRITY", "EJSONPARSE"].iter().any(|code| why.contains(code));
            assert!(!is_ours, "npm ci: {why}");
            Err(format!("npm ci failed: {}", why.lines().next().unwrap_or_default()))
        }
        Err(error) => Err(format!("npm cannot be run: {error}")),
    }
}

/// The variables with which an app in Node meets one fault of its disk: `fsync` or `short`.
pub(crate) fn disk_fault(fault: &'static str) -> [(&'static str, &'static str); 2] {
    let preload = concat!("--require=", env!("CARGO_MANIFEST_DIR"), "/tests/data/disk-faults.cjs");
    [("NODE_OPTIONS", preload), ("FAULT", fault)]
}
