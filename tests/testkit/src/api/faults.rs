//! Faults that a test orders: wrong answers, delays, silence.

use std::time::Duration;

/// What is done to a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Action {
    Status { code: u16, retry_after: Option<u32> },
    Delay(Duration),
    BlackHole,
    LoseAnswer,
}

/// A fault for the requests that it matches, for ever or a number of times.
#[derive(Debug, Clone)]
pub struct Fault {
    verb: Option<String>,
    resource: Option<String>,
    user: Option<String>,
    left: Option<u32>,
    pub(crate) action: Action,
}

impl Fault {
    fn new(action: Action) -> Self {
        Self { verb: None, resource: None, user: None, left: None, action }
    }

    /// Answers with this HTTP status and a matching `Status` body instead of doing what was asked. 429 carries
    /// `Retry-After: 1` unless [`Fault::retry_after`] says otherwise.
    #[must_use]
    pub fn status(code: u16) -> Self {
        Self::new(Action::Status { code, retry_after: (code == 429).then_some(1) })
    }

    /// Waits before doing what was asked.
    #[must_use]
    pub fn delay(time: Duration) -> Self {
        Self::new(Action::Delay(time))
    }

    /// Accepts the request and never answers; nothing is done.
    #[must_use]
    pub fn black_hole() -> Self {
        Self::new(Action::BlackHole)
    }

    /// Does what was asked, then drops the connection without an answer.
    #[must_use]
    pub fn lose_answer() -> Self {
        Self::new(Action::LoseAnswer)
    }

    /// Seconds for the `Retry-After` header of a status fault.
    #[must_use]
    pub fn retry_after(mut self, seconds: u32) -> Self {
        if let Action::Status { retry_after, .. } = &mut self.action {
            *retry_after = Some(seconds);
        }
        self
    }

    /// Only requests with this verb (`get`, `list`, `watch`, `create`, `update`, `patch`, `delete`, `deletecollection`)
    /// on this resource (`resourceslices`, `resourceclaims/status` …); `*` stands for any.
    #[must_use]
    pub fn on(mut self, verb: &str, resource: &str) -> Self {
        self.verb = (verb != "*").then(|| verb.to_owned());
        self.resource = (resource != "*").then(|| resource.to_owned());
        self
    }

    /// Only requests of this user.
    #[must_use]
    pub fn by(mut self, user: &str) -> Self {
        self.user = Some(user.to_owned());
        self
    }

    /// Only the next `count` matching requests.
    #[must_use]
    pub fn times(mut self, count: u32) -> Self {
        self.left = Some(count);
        self
    }
}

/// The faults in force, in the order in which they were ordered.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    list: Vec<Fault>,
    pub(crate) latency: Duration,
}

impl Faults {
    pub(crate) fn add(&mut self, fault: Fault) {
        self.list.push(fault);
    }

    pub(crate) fn clear(&mut self) {
        self.list.clear();
        self.latency = Duration::ZERO;
    }

    /// The first fault that matches; its count goes down.
    pub(crate) fn take(&mut self, verb: &str, resource: &str, user: &str) -> Option<Action> {
        let fits = |want: &Option<String>, have: &str| want.as_deref().is_none_or(|w| w == have);
        let index = self.list.iter().position(|f| {
            f.left != Some(0) && fits(&f.verb, verb) && fits(&f.resource, resource) && fits(&f.user, user)
        })?;
        let fault = &mut self.list[index];
        let action = fault.action.clone();
        if let Some(left) = &mut fault.left {
            *left -= 1;
            if *left == 0 {
                self.list.remove(index);
            }
        }
        Some(action)
    }
}
