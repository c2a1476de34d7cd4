//! The role that handlers work as, if the operator configured a separate one: it can reach the
//! tables of the schema `hapax` through functions only.

use super::connect::{ClientPool, PgError, PgOpenError, Pools};

/// Which server and database a connection leads to, and as which role.
const WHERE: &str = "SELECT current_user::text, \
                     (SELECT oid::text FROM pg_database WHERE datname = current_database()) \
                     || ' ' || pg_postmaster_start_time()::text";

/// The role that handlers work as, as [`super::PgStore::report_handler_role`] found it.
#[derive(Debug)]
pub struct HandlerRoleReport {
    /// Its name.
    pub role: String,
    /// Whether the role can write to the tables of Hapax.
    pub owns_ours: bool,
}

pub(super) async fn report(pools: &Pools) -> Result<HandlerRoleReport, PgOpenError> {
    let role = same_database(pools).await?.0;
    let ask = "SELECT coalesce(bool_or(has_table_privilege(c.oid, 'INSERT, UPDATE, DELETE')), false) \
               FROM pg_class c WHERE c.relnamespace = to_regnamespace('hapax') \
               AND c.relkind IN ('r', 'p')";
    let asked = async {
        let mut client = pools.handlers.checkout().await?;
        let rows = client.query(ask, &[]).await?;
        Ok(rows.first().is_some_and(|row| row.get(0)))
    };
    Ok(HandlerRoleReport { role, owns_ours: asked.await.map_err(open_error)? })
}

/// Checks that handlers' connections lead to the same database, and grants their role the rights
/// that a node needs.
pub(super) async fn admit(pools: &Pools) -> Result<(), PgOpenError> {
    let (role, owner) = same_database(pools).await?;
    if role == owner {
        tracing::warn!(
            "handlers_database_url connects as {role}, the owner of the schema hapax: use a role of \
             its own, so that no handler can change the tables of Hapax"
        );
        return Ok(());
    }
    let granted = async {
        let mut client = pools.admin.checkout().await?;
        client.query("SELECT hapax.admit_handlers($1)", &[&role]).await
    };
    granted.await.map(drop).map_err(open_error)
}

/// The role of handlers and ours, if both are in one database.
async fn same_database(pools: &Pools) -> Result<(String, String), PgOpenError> {
    let (owner, ours) = place_of(&pools.admin).await?;
    let (role, theirs) = place_of(&pools.handlers).await?;
    if ours == theirs {
        return Ok((role, owner));
    }
    let why = "it leads to another database than database_url; effects and \"done\" commit \
               together only in one";
    Err(PgOpenError::Handlers(why.to_owned()))
}

async fn place_of(client_pool: &ClientPool) -> Result<(String, String), PgOpenError> {
    let asked = async {
        let mut client = client_pool.checkout().await?;
        let rows = client.query(WHERE, &[]).await?;
        let row = rows.first().ok_or(PgError::Gone)?;
        Ok((row.get(0), row.get(1)))
    };
    asked.await.map_err(open_error)
}

fn open_error(error: PgError) -> PgOpenError {
    PgOpenError::Handlers(error.to_string())
}
