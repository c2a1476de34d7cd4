//! Prepares the statements of SQL handlers before the first event. A missing table or a syntax error is then
//! reported by an alert, by `doctor` and by `check-config`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use hapax_core::handler::{HandlerKind, SqlProgram};
use hapax_core::store::HandlerRef;
use hapax_store::{PgStore, SqliteStore};

use crate::config::{Config, ServiceUrl};

/// The statements of a configuration and their database.
#[derive(Clone, Default)]
pub(crate) struct Statements {
    programs: BTreeMap<String, (HandlerRef, Arc<SqlProgram>)>,
    target: Option<StatementDatabase>,
}

#[derive(Clone)]
enum StatementDatabase {
    /// The file, which may not exist yet.
    Sqlite(PathBuf),
    /// The URL of the database, with the role of handlers.
    Postgres(ServiceUrl),
}

/// A handler whose statements the database cannot prepare.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Unprepared {
    pub(crate) handler: HandlerRef,
    /// The statement, its position and the error of the database.
    pub(crate) why: String,
}

impl std::fmt::Display for Unprepared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let HandlerRef { source, handler } = &self.handler;
        write!(f, "{source}/{handler}: {}", self.why)
    }
}

impl std::fmt::Debug for Statements {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(self.programs.keys()).finish()
    }
}

impl Statements {
    /// The statements of this configuration.
    pub(crate) fn of(config: &Config) -> Self {
        let mut programs = BTreeMap::new();
        for configured in &config.templates {
            for handler in &configured.handlers {
                let HandlerKind::Sql(program) = &handler.kind else { continue };
                let source = configured.spec.name.clone();
                let name = format!("{source}/{}", handler.name);
                let handler = HandlerRef { source, handler: handler.name.clone() };
                programs.insert(name, (handler, Arc::clone(program)));
            }
        }
        let settings = &config.settings;
        let target = match (&settings.handlers_database_url, &settings.database_url) {
            (Some(url), _) | (None, Some(url)) => StatementDatabase::Postgres(url.clone()),
            (None, None) => StatementDatabase::Sqlite(settings.data_dir.join("hapax.db")),
        };
        Self { programs, target: Some(target) }
    }

    /// The handlers whose statements the database cannot prepare; an error if it cannot be reached.
    pub(crate) async fn unprepared(&self) -> Result<Vec<Unprepared>, String> {
        let (handlers, programs): (Vec<_>, Vec<_>) = self.programs.values().cloned().unzip();
        let faults = match &self.target {
            _ if programs.is_empty() => return Ok(Vec::new()),
            None => return Ok(Vec::new()),
            Some(StatementDatabase::Sqlite(file)) => {
                let file = file.clone();
                let check = move || SqliteStore::check_statements(&file, &programs);
                let checked = tokio::task::spawn_blocking(check).await;
                checked.map_err(|error| error.to_string())?.map_err(|error| error.to_string())?
            }
            Some(StatementDatabase::Postgres(url)) => {
                PgStore::check_statements(url.expose(), &programs)
                    .await
                    .map_err(|error| format!("{url}: {error}"))?
            }
        };
        let of_handler = |(handler, fault): (HandlerRef, Option<String>)| {
            fault.map(|why| Unprepared { handler, why })
        };
        Ok(handlers.into_iter().zip(faults).filter_map(of_handler).collect())
    }
}
