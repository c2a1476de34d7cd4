//! A Python that the examples can run in.

use std::path::Path;
use std::process::Command;

/// A Python with psycopg 3, or why the app cannot run here.
pub(crate) fn with_psycopg() -> Result<String, String> {
    let configured = std::env::var("HAPAX_TEST_PYTHON").ok().filter(|python| !python.is_empty());
    let known = configured.into_iter().chain(["python3".to_owned(), "/usr/bin/python3".to_owned()]);
    let has_psycopg = |python: &String| {
        let ran = Command::new(python).args(["-c", "import psycopg"]).output();
        ran.is_ok_and(|ran| ran.status.success())
    };
    known.into_iter().find(has_psycopg).ok_or("no python3 here has psycopg 3".to_owned())
}

/// Far longer than the installation of a few packages takes.
const SECONDS_MAX: &str = "120";

/// Installs the packages of an example's `requirements.txt` into `folder`, for `PYTHONPATH`. Returns the Python
/// that they were installed for, or why the packages cannot be fetched here.
pub(crate) fn install(example: &Path, folder: &Path) -> Result<String, String> {
    let python = "python3";
    std::fs::create_dir_all(folder).unwrap();
    // An index that accepts the request and never answers must not block the tests.
    let pip = Command::new("timeout")
        .args(["--kill-after=10", SECONDS_MAX, python, "-m", "pip", "install"])
        .args(["--quiet", "--disable-pip-version-check", "--retries=1", "--timeout=30"])
        .args(["--upgrade", "--target"])
        .arg(folder)
        .arg("--requirement")
        .arg(example.join("requirements.txt"))
        .output();
    match pip {
        Ok(ran) if ran.status.success() => Ok(python.to_owned()),
        Ok(ran) if matches!(ran.status.code(), Some(124 | 137)) => {
            Err(format!("pip install took longer than {SECONDS_MAX} s"))
        }
        Ok(ran) if ran.status.code() == Some(127) => Err("python3 is not installed".to_owned()),
        Ok(ran) => {
            let why = String::from_utf8_lossy(&ran.stderr);
            Err(format!("pip install failed: {}", why.lines().last().unwrap_or_default()))
        }
        Err(error) => Err(format!("pip cannot be run: {error}")),
    }
}
