//! Strict order per key: a backlog of two messages under each key is drained to an endpoint with order and
//! to one without. A tenth of the first attempts fails. The order of arrivals at the endpoint with order is
//! checked.

use std::cell::RefCell;
use std::collections::HashMap;
use std::path::Path;
use std::rc::Rc;
use std::time::Instant;

use anyhow::ensure;
use serde_json::json;

use crate::drain::{Delivered, FILLING};
use crate::publish::{KEYS_APART, Messages, key_of};
use crate::shared::load::Length;
use crate::shared::report::{Table, column};
use crate::shared::server::Server;
use crate::sink::{Arrival, Manner, Sink};
use crate::{IN_FLIGHT, Options, server};

/// The results of both sides.
pub(crate) struct Ordered {
    keys: u64,
    plain: Delivered,
    strict: Delivered,
}

impl Ordered {
    pub(crate) fn ratio(&self) -> f64 {
        self.strict.per_second() / self.plain.per_second()
    }

    pub(crate) fn table(&self) -> Table {
        let columns = [column("messages", 0), column("messages/s", 0), column("cpu us", 1)];
        let title = format!("{} keys, a tenth fails once", self.keys);
        let mut table = Table::new(title, columns);
        for (name, side) in [("without order", &self.plain), ("order = key", &self.strict)] {
            let cpu = side.cpu_seconds.map(|seconds| seconds * 1e6 / side.messages as f64);
            table.row(name, [Some(side.messages as f64), Some(side.per_second()), cpu]);
        }
        table
    }
}

pub(crate) async fn measure(options: &Options, directory: &Path) -> anyhow::Result<Ordered> {
    let sink = Sink::start()?;
    let hapax = server(options, directory, None, "")?;
    let keys = options.keys.next_multiple_of(KEYS_APART);
    for (tenant, order) in [("plain", "none"), ("strict", "key")] {
        let settings = json!({
            "tenant": tenant, "order": order, "max_in_flight": IN_FLIGHT, "timeout": "60s",
            "retry": ["0s", "1s", "1s", "1s"],
        });
        sink.add(&hapax, Manner::TenthFails, settings).await?;
    }
    let mut all = Ordered { keys, plain: Delivered::default(), strict: Delivered::default() };
    let [plain, strict] =
        ["plain", "strict"].map(|tenant| Rc::new(RefCell::new(Messages::keyed(tenant))));
    for _ in 0..options.rounds.max(1) {
        drain(&sink, &hapax, &plain, keys, &mut all.plain).await?;
        let arrivals = drain(&sink, &hapax, &strict, keys, &mut all.strict).await?;
        is_in_order(&arrivals)?;
    }
    Ok(all)
}

async fn drain(
    sink: &Sink,
    hapax: &Server,
    messages: &Rc<RefCell<Messages>>,
    keys: u64,
    side: &mut Delivered,
) -> anyhow::Result<Vec<Arrival>> {
    let (count, before) = (keys * 2, sink.delivered().await?);
    sink.close().await?;
    Messages::publish(messages, hapax, FILLING, Length::Events(count)).await?;
    let (usage, began) = (hapax.usage()?, Instant::now());
    sink.open().await?;
    let last = sink.drained(hapax, before + count).await?;
    side.messages += count;
    side.seconds += last.duration_since(began).as_secs_f64();
    *side.cpu_seconds.get_or_insert_default() += hapax.usage()?.cpu_seconds - usage.cpu_seconds;
    let arrivals = sink.take_arrivals().await?;
    let failed = arrivals.iter().filter(|arrival| !arrival.is_ok).count() as u64;
    ensure!(failed == keys / 10, "{failed} attempts failed, of {keys} keys");
    Ok(arrivals)
}

fn is_in_order(arrivals: &[Arrival]) -> anyhow::Result<()> {
    let mut last: HashMap<u64, u64> = HashMap::new();
    for Arrival { n, .. } in arrivals.iter().filter(|arrival| arrival.is_ok) {
        if let Some(earlier) = last.insert(key_of(*n), *n) {
            ensure!(earlier < *n, "message {n} arrived after {earlier}, which is later");
        }
    }
    Ok(())
}
