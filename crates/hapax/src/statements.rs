//! The statements of SQL handlers, prepared against the database before the first event needs them:
//! a missing table or a syntax error is then reported at the start, by `doctor` and by `check-config`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use hapax_core::handler::{HandlerKind, SqlProgram};
use hapax_core::store::HandlerRef;
use hapax_store::{PgStore, SqliteStore};

use crate::config::{Config, ServiceUrl};

/// The statements of a configuration, and the database they are for.
#[derive(Clone, Default)]
pub(crate) struct Statements {
    programs: BTreeMap<String, (HandlerRef, Arc<SqlProgram>)>,
    target: Option<Target>,
}

#[derive(Clone)]
enum Target {
    /// The file, which may not exist yet.
    Sqlite(PathBuf),
    /// As the role that handlers work as.
    Postgres(ServiceUrl),
}

/// A handler whose statements cannot run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Unprepared {
    pub(crate) handler: HandlerRef,
    /// Which statement, where, and what the database says of it.
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
    /// Those of this configuration.
    pub(crate) fn of(config: &Config) -> Self {
        let mut programs = BTreeMap::new();
        for configured in &config.sources {
            for handler in &configured.handlers {
                let HandlerKind::Sql(program) = &handler.kind else { continue };
                let source = configured.source.name().clone();
                let name = format!("{source}/{}", handler.name);
                let handler = HandlerRef { source, handler: handler.name.clone() };
                programs.insert(name, (handler, Arc::clone(program)));
            }
        }
        let settings = &config.settings;
        let target = match (&settings.handlers_database_url, &settings.database_url) {
            (Some(url), _) | (None, Some(url)) => Target::Postgres(url.clone()),
            (None, None) => Target::Sqlite(settings.data_dir.join("hapax.db")),
        };
        Self { programs, target: Some(target) }
    }

    /// Handlers whose statements the database cannot prepare; an error where it cannot be asked.
    pub(crate) async fn unprepared(&self) -> Result<Vec<Unprepared>, String> {
        let (handlers, programs): (Vec<_>, Vec<_>) = self.programs.values().cloned().unzip();
        let faults = match &self.target {
            _ if programs.is_empty() => return Ok(Vec::new()),
            None => return Ok(Vec::new()),
            Some(Target::Sqlite(file)) => {
                let file = file.clone();
                let check = move || SqliteStore::check_statements(&file, &programs);
                let checked = tokio::task::spawn_blocking(check).await;
                checked.map_err(|error| error.to_string())?.map_err(|error| error.to_string())?
            }
            Some(Target::Postgres(url)) => PgStore::check_statements(url.expose(), &programs)
                .await
                .map_err(|error| format!("{url}: {error}"))?,
        };
        let of_handler = |(handler, fault): (HandlerRef, Option<String>)| {
            fault.map(|why| Unprepared { handler, why })
        };
        Ok(handlers.into_iter().zip(faults).filter_map(of_handler).collect())
    }
}
