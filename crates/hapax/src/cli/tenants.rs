//! `hapax tenants`: the secrets of tenants that are added at run time, the deletion of a tenant's data, and links to
//! the portal, through the admin API.

use hapax_core::Timestamp;

use super::admin_client::{self, Remote, encoded};
use super::events::read;
use super::output::{self, CommandFailure, Exit};
use crate::api::{
    DeletionState, List, PortalAccess, PortalLink, RevokedLinks, SourceSecretRequest,
    SourceSecrets, SourceSecretsRequest, TenantDeletion,
};
use crate::{config, format};

/// `hapax tenants`.
#[derive(Debug, clap::Subcommand)]
pub(super) enum Tenants {
    /// Set the secrets of a tenant for a source; they replace all that were set before
    #[command(name = "set-secrets")]
    Set(SetSecrets),
    /// Show when the secrets of a tenant for a source end; their values are never shown
    #[command(name = "show-secrets")]
    Show(TenantSourceArgs),
    /// Remove the secrets of a tenant for a source: its webhooks get a 404
    #[command(name = "remove-secrets")]
    Remove(TenantSourceArgs),
    /// Delete what is stored for a tenant: endpoints, secrets, bodies, jobs, messages and deliveries
    Delete(Delete),
    /// Show the progress of the deletion of a tenant's data
    Deletion(TenantArg),
    /// Make a link to the portal, with which a receiving party sees its endpoints and deliveries
    Portal(Portal),
    /// List the links of a tenant to the portal that have not ended
    #[command(name = "portal-links")]
    PortalLinks(TenantArg),
    /// Revoke every link of a tenant to the portal, or one of them, at once
    #[command(name = "revoke-portal")]
    RevokePortal(RevokePortal),
}

impl Tenants {
    pub(super) fn run(self) -> Result<Exit, CommandFailure> {
        match self {
            Self::Set(set) => admin_client::run(set.run()),
            Self::Show(act) => admin_client::run(act.show()),
            Self::Remove(act) => admin_client::run(act.remove()),
            Self::Delete(delete) => admin_client::run(delete.run()),
            Self::Deletion(named) => admin_client::run(named.deletion()),
            Self::Portal(portal) => admin_client::run(portal.run()),
            Self::PortalLinks(named) => admin_client::run(named.portal_links()),
            Self::RevokePortal(revoke) => admin_client::run(revoke.run()),
        }
    }
}

/// `hapax tenants set-secrets`.
#[derive(clap::Args)]
pub(super) struct SetSecrets {
    #[command(flatten)]
    act: TenantSourceArgs,
    /// A secret: env:NAME, file:PATH or the text itself. May be repeated
    #[arg(long = "secret", value_name = "SECRET", required = true)]
    secrets: Vec<String>,
    /// A secret that is being replaced and ends at --old-until
    #[arg(long, value_name = "SECRET", requires = "old_until")]
    old: Option<String>,
    /// When the old secret ends: 2026-12-01T00:00:00Z
    #[arg(long, value_name = "TIME", requires = "old")]
    old_until: Option<Timestamp>,
}

// Not derived: it holds secrets.
impl std::fmt::Debug for SetSecrets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SetSecrets").field("act", &self.act).finish_non_exhaustive()
    }
}

impl SetSecrets {
    async fn run(self) -> Result<Exit, CommandFailure> {
        let old = self.old.iter().map(|old| (old, self.old_until));
        let all = self.secrets.iter().map(|secret| (secret, None)).chain(old);
        let secrets = all.map(|(text, until)| {
            let env = |name: &str| std::env::var(name).ok();
            let resolved = config::resolve_secret(text, &env)?;
            Ok(SourceSecretRequest { value: resolved.secret.expose().to_owned(), until })
        });
        let secrets = secrets.collect::<Result<Vec<_>, CommandFailure>>()?;
        let server = self.act.remote.open()?;
        let set = server.put(&self.act.path(), &SourceSecretsRequest { secrets }).await?;
        self.act.print(set)
    }
}

/// Commands that name one tenant of a source.
#[derive(Debug, clap::Args)]
pub(super) struct TenantSourceArgs {
    /// The tenant
    tenant: String,
    /// The source, as the config names it
    source: String,
    #[command(flatten)]
    remote: Remote,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl TenantSourceArgs {
    fn path(&self) -> String {
        format!(
            "/api/v1/tenants/{}/sources/{}/secrets",
            encoded(&self.tenant),
            encoded(&self.source)
        )
    }

    async fn show(self) -> Result<Exit, CommandFailure> {
        let server = self.remote.open()?;
        self.print(server.get(&self.path()).await?)
    }

    async fn remove(self) -> Result<Exit, CommandFailure> {
        let server = self.remote.open()?;
        let removed = server.delete(&self.path()).await?;
        if self.json {
            output::json(&removed)?;
            return Ok(Exit::Done);
        }
        output::words("removed: webhooks of this tenant for the source get a 404");
        Ok(Exit::Done)
    }

    fn print(&self, answer: serde_json::Value) -> Result<Exit, CommandFailure> {
        if self.json {
            output::json(&answer)?;
            return Ok(Exit::Done);
        }
        let found: SourceSecrets = read(answer)?;
        output::data(&output::shown(&format!("path     {}", found.path)))?;
        for secret in &found.secrets {
            let end = secret.until.map_or("no end".to_owned(), |until| format!("until {until}"));
            output::data(&format!("secret   {end}"))?;
        }
        if let Some(reason) = &found.reason {
            output::data(&output::shown(&format!("unused   {reason}")))?;
        }
        Ok(if found.active { Exit::Done } else { Exit::Negative })
    }
}

/// `hapax tenants delete`.
#[derive(Debug, clap::Args)]
pub(super) struct Delete {
    #[command(flatten)]
    named: TenantArg,
    /// Confirm: deleted data cannot be restored
    #[arg(long, required = true)]
    yes: bool,
}

impl Delete {
    async fn run(self) -> Result<Exit, CommandFailure> {
        let server = self.named.remote.open()?;
        let path = format!("/api/v1/tenants/{}", encoded(&self.named.tenant));
        self.named.print(server.delete(&path).await?)
    }
}

/// `hapax tenants portal`.
#[derive(Debug, clap::Args)]
pub(super) struct Portal {
    #[command(flatten)]
    named: TenantArg,
    /// How long the link lasts, such as 30m, 1h or 7d
    #[arg(long, value_name = "SPAN", default_value = "1h")]
    ttl: String,
    /// The rights of the holder: some of read,replay,endpoints
    #[arg(long, value_name = "RIGHTS", value_delimiter = ',', default_value = "read")]
    allow: Vec<String>,
}

impl Portal {
    async fn run(self) -> Result<Exit, CommandFailure> {
        let server = self.named.remote.open()?;
        let asked = serde_json::json!({ "ttl": self.ttl, "allow": self.allow });
        let answer = server.post(&self.named.portal_path(), &asked).await?;
        if self.named.json {
            output::json(&answer)?;
            return Ok(Exit::Done);
        }
        let made: PortalAccess = read(answer)?;
        output::data(&made.url)?;
        output::words(&format!(
            "opens the portal once, for the tenant {}, until {}",
            self.named.tenant, made.expires_at
        ));
        Ok(Exit::Done)
    }
}

/// `hapax tenants revoke-portal`.
#[derive(Debug, clap::Args)]
pub(super) struct RevokePortal {
    #[command(flatten)]
    named: TenantArg,
    /// Only this link, by its id
    #[arg(long, value_name = "ID")]
    link: Option<uuid::Uuid>,
}

impl RevokePortal {
    async fn run(self) -> Result<Exit, CommandFailure> {
        let server = self.named.remote.open()?;
        let path = match self.link {
            Some(link) => format!("{}?link={link}", self.named.portal_path()),
            None => self.named.portal_path(),
        };
        let answer = server.delete(&path).await?;
        if self.named.json {
            output::json(&answer)?;
            return Ok(Exit::Done);
        }
        let RevokedLinks { revoked } = read(answer)?;
        output::words(&format!("revoked {}", format::count(revoked, "link")));
        Ok(Exit::Done)
    }
}

/// Commands that name one tenant.
#[derive(Debug, clap::Args)]
pub(super) struct TenantArg {
    /// The tenant
    tenant: String,
    #[command(flatten)]
    remote: Remote,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl TenantArg {
    fn portal_path(&self) -> String {
        format!("/api/v1/tenants/{}/portal", encoded(&self.tenant))
    }

    async fn portal_links(self) -> Result<Exit, CommandFailure> {
        let server = self.remote.open()?;
        let answer = server.get(&self.portal_path()).await?;
        if self.json {
            output::json(&answer)?;
            return Ok(Exit::Done);
        }
        let links: List<PortalLink> = read(answer)?;
        for link in &links.items {
            let allow: Vec<_> = link.allow.iter().map(|right| right.as_str()).collect();
            let entered = match link.entered_at {
                Some(at) => format!("entered {}", format::at(at)),
                None => "not entered".to_owned(),
            };
            let ends = format::at(link.expires_at);
            output::data(&format!("{}  ends {ends}  {}  {entered}", link.link, allow.join(",")))?;
        }
        if links.items.is_empty() {
            output::words("no link of this tenant is open");
        }
        Ok(Exit::Done)
    }

    async fn deletion(self) -> Result<Exit, CommandFailure> {
        let server = self.remote.open()?;
        let path = format!("/api/v1/tenants/{}/deletion", encoded(&self.tenant));
        self.print(server.get(&path).await?)
    }

    fn print(&self, answer: serde_json::Value) -> Result<Exit, CommandFailure> {
        if self.json {
            output::json(&answer)?;
            return Ok(Exit::Done);
        }
        let found: TenantDeletion = read(answer)?;
        let state = match found.state {
            DeletionState::Running => "running: it continues in the background",
            DeletionState::Done => "done",
        };
        output::data(&format!("state      {state}"))?;
        output::data(&format!("began      {}", found.began_at))?;
        output::data(&format!("endpoints  {}", found.endpoints))?;
        output::data(&format!("events     {}", found.events))?;
        output::data(&format!("messages   {}", found.messages))?;
        Ok(Exit::Done)
    }
}
