//! An app that embeds Hapax, in a separate process: with a Rust handler that sleeps, or without a
//! handler.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use hapax::{Committed, Event, Failure, Handler, Hapax, Source, Tx, handler};

use crate::acks_while_working::NAP;
use crate::shared::events::SECRET;
use crate::shared::server::Server;

/// The handler's timeout: longer than its sleep of [`NAP`], even at the end of the run.
const TIMEOUT: Duration = Duration::from_secs(15);

/// Whether the app has a handler.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Handling {
    Nothing,
    Naps,
}

/// Starts this program again, as that app.
pub(crate) fn start(directory: &Path, handling: Handling) -> anyhow::Result<Server> {
    std::fs::create_dir_all(directory).context("making the app's directory")?;
    let directory = directory.to_str().context("a directory with a name in UTF-8")?;
    let flag = match handling {
        Handling::Nothing => "--embedded",
        Handling::Naps => "--embedded-napping",
    };
    Ok(Server::ourselves(&[flag, directory])?.that_decides())
}

/// The number of naps so far.
pub(crate) fn naps(directory: &Path) -> anyhow::Result<usize> {
    let naps = std::fs::metadata(nap_file(directory)).context("no handler took a nap")?;
    Ok(usize::try_from(naps.len())?)
}

/// Serves until killed.
pub(crate) fn run(directory: &Path, handling: Handling) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut stripe = Source::new("stripe", "stripe").secret(SECRET);
        if handling == Handling::Naps {
            let napper = Napper { nap_file: nap_file(directory) };
            stripe = stripe.handler(handler("napper", napper).timeout(TIMEOUT).lease(TIMEOUT * 2));
        }
        let hapax = Hapax::builder().data_dir(directory.join("data")).source(stripe);
        let hapax = hapax.open().await.context("opening Hapax")?;
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.context("listening")?;
        let mut out = std::io::stdout().lock();
        writeln!(out, "app ready: ingress http://{}", listener.local_addr()?)?;
        drop(out);
        let working = hapax.spawn();
        let app = hapax.router().into_make_service_with_connect_info::<SocketAddr>();
        axum::serve(listener, app).await.context("serving")?;
        working.stop().await;
        Ok(())
    })
}

/// A handler that takes ten seconds, and adds one byte to a file for each nap.
struct Napper {
    nap_file: PathBuf,
}

impl Handler for Napper {
    async fn handle(&self, _: Event, tx: Tx) -> Result<Committed, Failure> {
        OpenOptions::new().create(true).append(true).open(&self.nap_file)?.write_all(b".")?;
        tokio::time::sleep(NAP).await;
        Ok(tx.nothing_to_do("slept").await?)
    }
}

fn nap_file(directory: &Path) -> PathBuf {
    directory.join("naps")
}
