//! `--watch`: what there is, then what changes.

use jiff::Timestamp;
use npu_proto::admin as proto;

use crate::{
    client::Client,
    document::{CardHealth, Claim, Device, time},
    failure::Failure,
    output::Output,
    view::Item,
};

/// A kind of thing that can be watched.
pub(crate) trait Watched: Item + PartialEq + Sized {
    /// What to ask for.
    fn request() -> proto::WatchRequest;
    /// What an answer tells: what is new or different, and what is no longer there.
    fn news(answer: proto::WatchResponse) -> (Vec<Self>, Vec<String>);
    /// How it looks once it is no longer there.
    fn ended(self) -> Self;
}

impl Watched for Device {
    fn request() -> proto::WatchRequest {
        proto::WatchRequest { devices: true, claims: false }
    }

    fn news(answer: proto::WatchResponse) -> (Vec<Self>, Vec<String>) {
        (answer.devices.into_iter().map(Into::into).collect(), answer.removed_devices)
    }

    fn ended(self) -> Self {
        Self { state: "gone".to_owned(), health: None, claims: Vec::new(), taints: Vec::new(), ..self }
    }
}

impl Watched for CardHealth {
    fn request() -> proto::WatchRequest {
        Device::request()
    }

    fn news(answer: proto::WatchResponse) -> (Vec<Self>, Vec<String>) {
        let (devices, removed) = Device::news(answer);
        (devices.into_iter().map(Into::into).collect(), removed)
    }

    fn ended(self) -> Self {
        Self { health: None, ..self }
    }
}

impl Watched for Claim {
    fn request() -> proto::WatchRequest {
        proto::WatchRequest { devices: false, claims: true }
    }

    fn news(answer: proto::WatchResponse) -> (Vec<Self>, Vec<String>) {
        (answer.claims.into_iter().map(Into::into).collect(), answer.removed_claims)
    }

    fn ended(self) -> Self {
        Self { state: "released".to_owned(), ..self }
    }
}

/// Prints what `wanted` picks, then what changes of it, until Ctrl-C. Each of `names` must be there at the start.
pub(crate) async fn watch<T: Watched>(
    client: &Client,
    output: &Output,
    names: &[String],
    wanted: impl Fn(&T) -> bool,
) -> Result<(), Failure> {
    // Ctrl-C counts from here, so it cannot come too early to end with 0.
    let interrupt = tokio::signal::ctrl_c();
    let watching = async {
        let mut stream = client.watch(T::request()).await?;
        let mut screen = Screen { shown: Vec::new(), header: output.headers };
        let mut names = Some(names);
        loop {
            let answer = client.next(&mut stream).await?;
            let now = time(answer.taken_at_ms).unwrap_or_else(Timestamp::now);
            let (news, removed) = T::news(answer);
            // The first answer has everything.
            let names = names.take().unwrap_or_default();
            if let Some(absent) = names.iter().find(|name| !news.iter().any(|item| item.id() == name.as_str())) {
                return Err(Failure::NoDevice(absent.clone()));
            }
            screen.update(output, news, &removed, &wanted, now)?;
        }
    };
    tokio::select! {
        // An interrupt that cannot be heard ends the process by itself.
        Ok(()) = interrupt => Ok(()),
        result = watching => result,
    }
}

/// What has been printed.
struct Screen<T> {
    shown: Vec<T>,
    /// True while the header is still to be printed.
    header: bool,
}

impl<T: Watched> Screen<T> {
    fn update(
        &mut self,
        output: &Output,
        news: Vec<T>,
        removed: &[String],
        wanted: &impl Fn(&T) -> bool,
        now: Timestamp,
    ) -> Result<(), Failure> {
        let mut changed = Vec::new();
        let mut ended = Vec::new();
        for item in news {
            let at = self.shown.iter().position(|shown| shown.id() == item.id());
            match at {
                Some(at) if looks_alike(output, &self.shown[at], &item, now) => self.shown[at] = item,
                Some(at) => {
                    changed.push(item.id().to_owned());
                    self.shown[at] = item;
                }
                None if wanted(&item) => {
                    changed.push(item.id().to_owned());
                    self.shown.push(item);
                }
                None => {}
            }
        }
        for id in removed {
            if let Some(item) = self.shown.iter_mut().find(|item| item.id() == id) {
                *item = item.clone().ended();
                changed.push(id.clone());
                ended.push(id.clone());
            }
        }
        self.print(output, &changed, now)?;
        self.shown.retain(|item| !ended.iter().any(|id| id == item.id()) && wanted(item));
        Ok(())
    }

    /// Prints the changed rows. Their columns are as wide as all that is shown needs, so that they stay below each
    /// other.
    fn print(&mut self, output: &Output, changed: &[String], now: Timestamp) -> Result<(), Failure> {
        let is_changed = |item: &T| changed.iter().any(|id| id == item.id());
        if !output.is_for_people() {
            return self.shown.iter().filter(|item| is_changed(item)).try_for_each(|item| output.changed(item));
        }
        let table = output.table(&self.shown, now);
        let (header, rows) = table.split_at(usize::from(output.headers).min(table.len()));
        let rows = self.shown.iter().zip(rows).filter(|(item, _)| is_changed(item)).map(|(_, row)| row);
        let header = header.iter().filter(|_| std::mem::take(&mut self.header));
        let lines: Vec<_> = header.chain(rows).collect();
        Output::lines(&lines)
    }
}

/// True if a reader of this form of output sees no difference.
fn looks_alike<T: Watched>(output: &Output, old: &T, new: &T, now: Timestamp) -> bool {
    if old == new {
        return true;
    }
    let shown = |item: &T| {
        let row = item.row(now);
        let is_wide = output.form == crate::args::Form::Wide;
        row.into_iter().zip(T::COLUMNS).filter(move |(_, column)| is_wide || !column.wide).map(|(cell, _)| cell)
    };
    output.is_for_people() && shown(old).eq(shown(new))
}
