//! Apps in Node with packages of the registry, in a folder of their own: the repository holds their
//! lock files only.

use std::path::Path;
use std::process::Command;

/// Far beyond what a handful of packages take.
const SECONDS_MAX: &str = "120";

/// Puts the files of an example and its packages into `folder`, or says why they cannot be had here.
/// A lock file that does not fit is no such reason: that is a defect of the example.
pub(crate) fn install(example: &Path, folder: &Path) -> Result<(), String> {
    std::fs::create_dir_all(folder).unwrap();
    for entry in std::fs::read_dir(example).unwrap() {
        let file = entry.unwrap();
        if file.file_type().unwrap().is_file() {
            std::fs::copy(file.path(), folder.join(file.file_name())).unwrap();
        }
    }
    // A registry that takes the question and never answers must not hold up everything else.
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
