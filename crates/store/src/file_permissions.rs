//! Permissions of the data directory and its files: events hold senders' customer data, so only the
//! user that Hapax runs as may read them.

use std::fs::{DirBuilder, File, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;

/// Creates the directory if it does not exist, and otherwise removes the rights of other users
/// (mode 0700). The name of a new directory is on disk only after its parent directory was synced.
/// So this function syncs the parents of all new directories before it returns.
///
/// # Errors
/// Returns an error if the directory cannot be created. A directory of another user, such as a
/// mounted volume, is used as it is, with a warning in the log.
pub fn private_dir(directory: &Path) -> io::Result<()> {
    let is_missing = |one: &&Path| !one.as_os_str().is_empty() && !one.exists();
    let missing: Vec<&Path> = directory.ancestors().take_while(is_missing).collect();
    DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
    for made in missing {
        let parent = made.parent().filter(|parent| !parent.as_os_str().is_empty());
        File::open(parent.unwrap_or(Path::new(".")))?.sync_all()?;
    }
    narrow(directory, 0o700)
}

/// Opens the file for writing with mode 0600. Creates the file if it does not exist, and keeps its content.
pub(crate) fn private_file(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    let file = options.create(true).truncate(false).write(true).mode(0o600).open(path)?;
    narrow(path, 0o600)?;
    Ok(file)
}

/// Removes the rights of other users from an existing file; a missing file is ignored.
pub(crate) fn narrow(path: &Path, mode: u32) -> io::Result<()> {
    let found = match std::fs::metadata(path) {
        Ok(found) => found.permissions().mode(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    if found & 0o077 == 0 {
        return Ok(());
    }
    if let Err(error) = std::fs::set_permissions(path, Permissions::from_mode(mode)) {
        let shown = path.display();
        tracing::warn!(
            "other users can read {shown} (mode {:o}), and it cannot be changed: {error}",
            found & 0o777
        );
    }
    Ok(())
}
