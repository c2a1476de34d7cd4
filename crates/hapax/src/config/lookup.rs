//! Single settings for commands that talk to a server or to its database. Nothing else of the config
//! is read, so secrets that it names may be missing.

use std::net::SocketAddr;
use std::path::PathBuf;

use super::document::{self, Section};
use super::overrides::Flags;
use super::problem::ConfigErrors;
use super::reader::{ConfigReader, Environment, find_file};
use super::settings::Settings;
use super::shared::ServiceUrl;

/// The address and data dir of a server, from its config.
#[derive(Debug)]
pub(crate) struct ServerLocation {
    /// The admin side.
    pub(crate) admin_listen: SocketAddr,
    /// Whether the admin side speaks TLS.
    pub(crate) admin_tls: bool,
    /// The data directory.
    pub(crate) data_dir: PathBuf,
    /// The config file, if there is one.
    pub(crate) file: Option<PathBuf>,
}

/// Reads the address and data dir of a server.
pub(crate) fn server_location(flags: &Flags) -> Result<ServerLocation, ConfigErrors> {
    let environment = Environment::real(true);
    let (file, text) = find_file(flags, &environment)?;
    let mut reader = ConfigReader::new(&environment, &text);
    let mut settings = Settings::default();
    let mut admin_tls = false;
    if let Some(document) = document::parse(&text, &mut reader.problems) {
        for entry in Section::root(&document).entries() {
            admin_tls |= entry.name() == "admin_tls";
            if let key @ ("admin_listen" | "data_dir") = entry.name() {
                entry.parse(|text| settings.set(key, text), &mut reader.problems);
            }
        }
    }
    let of_interest = |key: &str| matches!(key, "admin_listen" | "data_dir");
    reader.apply_overrides(flags, &mut settings, of_interest);
    if !reader.problems.is_empty() {
        return Err(reader.problems.into_errors(file.as_deref(), &text));
    }
    let Settings { admin_listen, data_dir, .. } = settings;
    Ok(ServerLocation { admin_listen, admin_tls, data_dir, file })
}

/// Reads `database_url`.
pub(crate) fn database_url(flags: &Flags) -> Result<Option<ServiceUrl>, ConfigErrors> {
    let environment = Environment::real(true);
    let (file, text) = find_file(flags, &environment)?;
    let mut reader = ConfigReader::new(&environment, &text);
    let mut settings = Settings::default();
    reader.apply_overrides(flags, &mut settings, |key| key == "database_url");
    if let Some(document) = document::parse(&text, &mut reader.problems)
        && settings.database_url.is_none()
        && let Some(entry) = Section::root(&document).get("database_url")
        && let Some(secret) = reader.secret(&entry)
        && let Err(invalid) = settings.set("database_url", secret.expose())
    {
        entry.report(invalid, &mut reader.problems);
    }
    match reader.problems.is_empty() {
        true => Ok(settings.database_url),
        false => Err(reader.problems.into_errors(file.as_deref(), &text)),
    }
}
