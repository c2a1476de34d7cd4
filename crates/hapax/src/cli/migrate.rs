//! `hapax migrate` and `hapax sql`: apply or print the schema of a shared PostgreSQL. The embedded
//! database is migrated when it is opened.

use hapax_store::{MigrationStatus, PgOpenError, PgStore};
use serde_json::json;

use super::admin_client;
use super::output::{self, CommandFailure, Exit};
use crate::config::{self, Flags, ServiceUrl};

/// `hapax migrate`.
#[derive(Debug, clap::Args)]
pub(super) struct Migrate {
    /// What to do [default: status]
    // An argument and not a subcommand, so that flags may stand on either side of it.
    action: Option<MigrateAction>,
    #[command(flatten)]
    flags: Flags,
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum MigrateAction {
    /// List the migrations and whether each is applied; exit 1 if some are missing or unknown
    Status,
    /// Apply the missing migrations; several nodes may do so at once
    Up,
}

/// `hapax sql`.
#[derive(Debug, clap::Subcommand)]
pub(super) enum Sql {
    /// One table and the function `hapax.once(scope, key)`, for use without a Hapax server
    Once,
    /// The whole schema, in order
    Schema,
}

impl Migrate {
    pub(super) fn run(self) -> Result<Exit, CommandFailure> {
        let Some(url) = config::database_url(&self.flags)? else {
            return Err(CommandFailure::usage(
                "database_url is not set: there is no shared database to migrate",
                "set database_url; the embedded database is migrated when it is opened",
            ));
        };
        match self.action.unwrap_or(MigrateAction::Status) {
            MigrateAction::Status => self.status(&url),
            MigrateAction::Up => {
                admin_client::run(async {
                    PgStore::migrate(url.expose()).await.map_err(|e| failed(&url, &e))
                })?;
                self.status(&url)
            }
        }
    }

    fn status(&self, url: &ServiceUrl) -> Result<Exit, CommandFailure> {
        let steps = admin_client::run(async {
            PgStore::migration_status(url.expose()).await.map_err(|error| failed(url, &error))
        })?;
        for step in &steps {
            self.print(step)?;
        }
        let good = |step: &MigrationStatus| step.applied && step.refused.is_none();
        Ok(if steps.iter().all(good) { Exit::Done } else { Exit::Negative })
    }

    fn print(&self, step: &MigrationStatus) -> Result<(), CommandFailure> {
        let MigrationStatus { number, name, applied, refused } = step;
        if self.json {
            let row =
                json!({ "number": number, "name": name, "applied": applied, "refused": refused });
            output::json(&row)?;
        } else {
            let state = match (applied, refused) {
                (_, Some(why)) => &format!("refused: {why}"),
                (true, None) => "applied",
                (false, None) => "missing",
            };
            output::data(&format!("{number:04}  {name:<12} {state}"))?;
        }
        Ok(())
    }
}

impl Sql {
    #[allow(clippy::unnecessary_wraps, reason = "every command has this signature")]
    pub(super) fn run(self) -> Result<Exit, CommandFailure> {
        let text = match self {
            Self::Once => PgStore::once_sql().to_owned(),
            Self::Schema => PgStore::schema_sql(),
        };
        output::data(text.trim_end())?;
        Ok(Exit::Done)
    }
}

fn failed(url: &ServiceUrl, error: &PgOpenError) -> CommandFailure {
    CommandFailure::unreachable(format!("{url}: {error}"))
}
