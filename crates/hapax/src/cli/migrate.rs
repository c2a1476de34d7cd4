//! `hapax migrate` and `hapax sql`: the tables in a shared PostgreSQL, brought forward or printed for
//! those who run their migrations by hand. The embedded database needs neither: it is brought forward
//! when it is opened.

use hapax_store::{MigrationStatus, PgOpenError, PgStore};
use serde_json::json;

use super::admin_client;
use super::output::{self, Exit, Failure};
use crate::config::{self, Flags, ServiceUrl};

/// `hapax migrate`.
#[derive(Debug, clap::Args)]
pub(super) struct Migrate {
    /// What to do: `status` where nothing is said
    // A word and no subcommand: flags may stand on either side of it.
    action: Option<MigrateAction>,
    #[command(flatten)]
    flags: Flags,
    /// One JSON object a line
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum MigrateAction {
    /// Say which steps the database has taken; exit 1 when some are missing or not ours
    Status,
    /// Take the missing steps; several nodes may try at once
    Up,
}

/// `hapax sql`.
#[derive(Debug, clap::Subcommand)]
pub(super) enum Sql {
    /// One table and `hapax.once(scope, key)`, to use without any Hapax server
    Once,
    /// Every step of the schema, in order, to be run by hand
    Schema,
}

impl Migrate {
    pub(super) fn run(self) -> Result<Exit, Failure> {
        let Some(url) = config::database_url(&self.flags)? else {
            return Err(Failure::usage(
                "no database_url: there is no shared database to migrate",
                "the embedded database is brought forward whenever it is opened",
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

    fn status(&self, url: &ServiceUrl) -> Result<Exit, Failure> {
        let steps = admin_client::run(async {
            PgStore::migration_status(url.expose()).await.map_err(|error| failed(url, &error))
        })?;
        for step in &steps {
            self.print(step)?;
        }
        let good = |step: &MigrationStatus| step.applied && step.refused.is_none();
        Ok(if steps.iter().all(good) { Exit::Done } else { Exit::Negative })
    }

    fn print(&self, step: &MigrationStatus) -> Result<(), Failure> {
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
    #[allow(clippy::unnecessary_wraps, reason = "every command answers the same way")]
    pub(super) fn run(self) -> Result<Exit, Failure> {
        let text = match self {
            Self::Once => PgStore::once_sql().to_owned(),
            Self::Schema => PgStore::schema_sql(),
        };
        output::data(text.trim_end())?;
        Ok(Exit::Done)
    }
}

fn failed(url: &ServiceUrl, error: &PgOpenError) -> Failure {
    Failure::unreachable(format!("{url}: {error}"))
}
