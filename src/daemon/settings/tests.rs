use std::{cell::RefCell, collections::HashMap, fs};

use crate::domain::model::{Model, Wish};

use super::{keys::Kind, *};

/// Everything that can be given, in a directory of its own.
struct Case {
    dir: tempfile::TempDir,
    flags: HashMap<&'static str, &'static str>,
    variables: HashMap<&'static str, &'static str>,
    host: &'static str,
    asked: RefCell<Vec<String>>,
}

impl Case {
    fn new() -> Self {
        Self {
            dir: tempfile::tempdir().unwrap(),
            flags: HashMap::new(),
            variables: HashMap::new(),
            host: "Worker-3",
            asked: RefCell::default(),
        }
    }

    fn flag(mut self, name: &'static str, value: &'static str) -> Self {
        self.flags.insert(name, value);
        self
    }

    fn variable(mut self, name: &'static str, value: &'static str) -> Self {
        self.variables.insert(name, value);
        self
    }

    fn file(self, name: &str, text: &str) -> Self {
        let path = self.dir.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
        self
    }

    fn read(&self) -> Result<(Inputs, Settings), SettingsError> {
        let config = self.dir.path().join("npu-dra.toml");
        if !config.exists() {
            fs::write(&config, "").unwrap();
        }
        let given = Given {
            config: Some(&config),
            flag: &|key| self.flags.get(key.flag).map(|text| (*text).to_owned()),
            variable: &|name| {
                self.asked.borrow_mut().push(name.to_owned());
                self.variables.get(name).map(|text| (*text).to_owned())
            },
            host_name: self.host,
        };
        let inputs = read(&given)?;
        let settings = Settings::from_inputs(&inputs, &given)?;
        Ok((inputs, settings))
    }

    fn error(&self) -> String {
        let error = self.read().unwrap_err();
        error.to_string().replace(&self.dir.path().display().to_string(), "")
    }
}

#[test]
fn defaults_are_those_of_the_requirements() {
    let (_, settings) = Case::new().read().unwrap();
    assert_eq!(settings.cdi_root, Path::new("/etc/cdi"));
    assert_eq!(settings.driver.as_str(), "npu.huawei.com");
    assert_eq!(settings.registrar_dir, Path::new("/var/lib/kubelet/plugins_registry"));
    assert_eq!(settings.plugins_dir, Path::new("/var/lib/kubelet/plugins"));
    assert_eq!(settings.node.as_str(), "worker-3", "the host name in lower case");
    assert_eq!(settings.pool.as_str(), "worker-3/npu");
    assert_eq!(settings.healthcheck, None);
    assert_eq!(settings.kubeconfig, None);
    assert_eq!(settings.slicing, Wish::default());
    assert_eq!(settings.backend, Choice::Auto);
    assert_eq!(settings.state_dir, Path::new("/var/lib/npu-dra"));
    assert_eq!(settings.admin_socket, Path::new("/run/npu-dra/admin.sock"));
    assert_eq!(settings.device_wait, None, "150s, and 360s on a 910C");
}

#[test]
fn every_default_in_the_table_is_allowed_and_every_name_is_one_name() {
    for key in KEYS {
        assert_eq!(key.flag, key.name.replace('.', "-"));
        assert!(!key.help.ends_with('.') && !key.help.contains('\n'), "{}", key.name);
        let optional = matches!(key.kind, Kind::Text | Kind::Path) && key.default.is_empty();
        assert!(optional || key.kind.parse(key.default).is_ok(), "{}", key.name);
    }
    assert_eq!(keys::DEVICE_WAIT.variable(), "DEVICE_WAIT");
    assert_eq!(keys::CDI_ROOT.variable(), "CDI_ROOT");
}

#[test]
fn a_flag_beats_a_variable_which_beats_a_file() {
    let case = Case::new().file("npu-dra.toml", "cdi-root = \"/file\"\n");
    let (inputs, settings) = case.read().unwrap();
    assert_eq!(settings.cdi_root, Path::new("/file"));
    assert!(inputs.get(&keys::CDI_ROOT).origin.to_string().ends_with("/npu-dra.toml:1"));
    let case = case.variable("CDI_ROOT", "/variable");
    let (inputs, settings) = case.read().unwrap();
    assert_eq!(settings.cdi_root, Path::new("/variable"));
    assert_eq!(inputs.get(&keys::CDI_ROOT).origin.to_string(), "variable CDI_ROOT");
    let case = case.flag("cdi-root", "/flag");
    let (inputs, settings) = case.read().unwrap();
    assert_eq!(settings.cdi_root, Path::new("/flag"));
    assert_eq!(inputs.get(&keys::CDI_ROOT).origin.to_string(), "flag --cdi-root");
}

#[test]
fn an_empty_variable_is_not_set() {
    let (_, settings) = Case::new().variable("CDI_ROOT", "").variable("NODE_NAME", "").read().unwrap();
    assert_eq!(settings.cdi_root, Path::new("/etc/cdi"));
    assert_eq!(settings.node.as_str(), "worker-3");
}

#[test]
fn drop_ins_are_read_in_the_order_of_their_names_and_others_are_left_alone() {
    let (inputs, settings) = Case::new()
        .file("npu-dra.toml", "node-name = \"main\"\nbackend = \"example\"\nexample.count = 1\n")
        .file("npu-dra.toml.d/20-b.conf", "example.count = 3\n")
        .file("npu-dra.toml.d/10-a.toml", "example.count = 2\nlog.level = \"debug\"\n")
        .file("npu-dra.toml.d/30-c.toml.dpkg-old", "example.count = 4\n")
        .file("npu-dra.toml.d/.40-d.toml", "example.count = 5\n")
        .read()
        .unwrap();
    assert_eq!((settings.node.as_str(), settings.backend), ("main", Choice::Example(3)));
    assert_eq!(settings.log_level, "debug");
    assert!(inputs.get(&keys::EXAMPLE_COUNT).origin.to_string().ends_with("20-b.conf:1"));
}

#[test]
fn dots_tables_and_dashes_are_one_name() {
    for text in ["device.wait = \"2m\"", "[device]\nwait = \"120s\"", "device-wait = \"2m 0s\""] {
        let (_, settings) = Case::new().file("npu-dra.toml", text).read().unwrap();
        assert_eq!(settings.device_wait, Some(Duration::from_mins(2)), "{text}");
    }
    let twice = Case::new().file("npu-dra.toml", "device-wait = \"2m\"\n\n[device]\nwait = \"120s\"\n").error();
    assert!(twice.contains("\"device.wait\" is set twice"), "{twice}");
}

#[test]
fn errors_name_file_line_key_and_what_is_allowed() {
    let cases = [
        ("\n\ncdi-rot = \"/x\"\n", "/npu-dra.toml:3: unknown key \"cdi-rot\"; known keys are node-name, "),
        ("[health]\nfoo = 1\n", "/npu-dra.toml:2: unknown key \"health.foo\"; known keys are"),
        ("health-foo = 1\n", "/npu-dra.toml:1: unknown key \"health-foo\""),
        ("[a.b]\n\nc.d-e = 1\n", "/npu-dra.toml:3: unknown key \"a.b.c.d-e\""),
        ("[cutting]\nmodel = \"x\"\n", "/npu-dra.toml:2: unknown key \"cutting.model\""),
        (
            "\ndevice.wait = \"5 parsecs\"\n",
            "/npu-dra.toml:2: device.wait = \"5 parsecs\" is not valid; allowed is a span of time such as \"5s\"",
        ),
        ("device.wait = 5\n", "/npu-dra.toml:1: device.wait = 5 is not valid; allowed is a span"),
        ("device.wait = \"-5s\"\n", "from 0s to 3600s"),
        (
            "healthcheck-port = 70000\n",
            "healthcheck-port = 70000 is not valid; allowed is a whole number from -1 to 65535",
        ),
        ("healthcheck-port = 0\n", "/npu-dra.toml:1: healthcheck-port = 0 is not valid; allowed is a port from 1"),
        ("healthcheck-port = \"1\"\n", "healthcheck-port = \"1\" is not valid; allowed is a whole number"),
        ("enable-hard-vnpu = \"yes\"\n", "allowed is true or false"),
        ("slicing.model = \"mig\"\n", "allowed is auto, consumable, partitionable, static, off"),
        ("slicing.layout = \"npu-0\"\n", "allowed is cards and their templates"),
        ("slicing.layout = \"npu-0=big\"\n", "allowed is cards and their templates"),
        ("slicing.layout = \"npu-0=vir05_1c_8g;npu-0=vir10_3c_16g\"\n", "allowed is each card once"),
        (
            "\nslicing.layout = \"npu-0=vir05_1c_8g; npu-2=vir10_3c_16g+vir99\"\n",
            "/npu-dra.toml:2: slicing.layout = \"npu-0=vir05_1c_8g; npu-2=vir10_3c_16g+vir99\" is not valid; allowed is \
             one of vir05_1c_16g, vir05_1c_8g, vir06_1c_16g, vir10_3c_16g, vir10_3c_16g_nm, vir10_3c_32g, \
             vir10_4c_16g_m, vir12_3c_32g in the place of vir99",
        ),
        ("backend = \"cuda\"\n", "backend = \"cuda\" is not valid; allowed is auto, dcmi, sysfs, example"),
        (
            "device-profile = \"gpu\"\nbackend = \"dcmi\"\n",
            ":2: backend = \"dcmi\" is not valid; allowed is auto or example",
        ),
        ("node-name = [\n\"a\"]\n", "node-name = [ is not valid; allowed is text"),
        ("[node-name]\na = 1\n", ":1: node-name = a table is not valid; allowed is text"),
        ("cdi.topo = 2026-11-30\n", "cdi.topo = 2026-11-30 is not valid; allowed is true or false"),
        ("log.level = \"a=b=c\"\n", "log.level = \"a=b=c\" is not valid; allowed is error, warn"),
        ("node-name = \"Bad_Node\"\n", ":1: node-name = \"Bad_Node\" is not valid; allowed is a DNS subdomain"),
        ("driver-name = \"UPPER\"\n", "driver-name = \"UPPER\" is not valid; allowed is a DNS subdomain"),
        ("instance-id = \"a/b\"\n", "instance-id = \"a/b\" is not valid; allowed is letters, digits and '-'"),
        ("cdi-root = \"\"\n", "cdi-root = \"\" is not valid; allowed is a path that is not empty"),
        ("cdi-root = \"/a\"\ncdi-root = \"/b\"\n", "/npu-dra.toml:2: not valid TOML: duplicate key"),
        ("cdi-root = \n", "/npu-dra.toml:1: not valid TOML"),
    ];
    for (text, expected) in cases {
        let error = Case::new().file("npu-dra.toml", text).error();
        assert!(error.contains(expected), "{text:?} gave: {error}");
    }
    let error = Case::new().variable("DEVICE_WAIT", "soon").error();
    assert!(error.starts_with("variable DEVICE_WAIT: device.wait = \"soon\" is not valid"), "{error}");
    let error = Case::new().flag("device-wait", "soon").error();
    assert!(error.starts_with("flag --device-wait: device.wait = \"soon\" is not valid"), "{error}");
}

#[test]
fn a_named_file_that_is_missing_is_an_error() {
    let missing = Path::new("/nonexistent/npu-dra.toml");
    let given = Given { config: Some(missing), flag: &|_| None, variable: &|_| None, host_name: "a" };
    assert_eq!(read(&given).unwrap_err().to_string(), "/nonexistent/npu-dra.toml: cannot be read");
}

#[test]
fn a_host_name_that_is_no_node_name_asks_for_one() {
    let mut case = Case::new();
    case.host = "bad_host";
    assert!(case.error().starts_with("the host name \"bad_host\" cannot be a node name (a DNS subdomain"));
    assert!(case.flag("node-name", "good").read().is_ok());
}

#[test]
fn the_admin_socket_may_have_107_bytes_and_no_more() {
    let fits: &'static str = format!("/{}", "a".repeat(106)).leak();
    let longer: &'static str = format!("/{}", "a".repeat(107)).leak();
    assert!(Case::new().flag("admin-socket", fits).read().is_ok());
    let error = Case::new().flag("admin-socket", longer).error();
    assert!(error.contains("the path of the admin socket has 108 bytes, 107 are allowed; set admin.socket"), "{error}");
}

#[test]
fn a_static_layout_is_read_card_by_card() {
    let case = Case::new().flag("enable-hard-vnpu", "true").flag("slicing-model", "static");
    let case = case.flag("slicing-layout", "npu-0=vir10_3c_16g+vir05_1c_8g ; npu-1=vir10_3c_16g;");
    let slicing = case.read().unwrap().1.slicing;
    assert_eq!(slicing.model, Some(Model::Static));
    assert_eq!(slicing.layout["npu-0"], ["vir10_3c_16g", "vir05_1c_8g"]);
    assert_eq!(slicing.layout["npu-1"], ["vir10_3c_16g"]);
}

#[test]
fn slicing_is_accepted_on_a_host_and_refused_in_a_container() {
    assert!(Case::new().flag("enable-hard-vnpu", "true").read().unwrap().1.slicing.enabled);
    let pod = Case::new().variable("KUBERNETES_SERVICE_HOST", "10.96.0.1");
    assert!(pod.read().is_ok());
    let error = pod.flag("enable-hard-vnpu", "true").error();
    assert!(
        error.starts_with("flag --enable-hard-vnpu: enable-hard-vnpu = true is not valid in a container"),
        "{error}"
    );
}

#[test]
fn systemd_names_the_directories_unless_the_operator_does() {
    let unit = Case::new().variable("STATE_DIRECTORY", "/var/lib/a:/var/lib/b").variable("RUNTIME_DIRECTORY", "/run/a");
    let (inputs, settings) = unit.read().unwrap();
    assert_eq!(settings.state_dir, Path::new("/var/lib/a"));
    assert_eq!(settings.admin_socket, Path::new("/run/a/admin.sock"));
    assert_eq!(inputs.get(&keys::STATE_DIR).origin.to_string(), "variable STATE_DIRECTORY");
    let (_, settings) = unit.flag("state-dir", "/mine").read().unwrap();
    assert_eq!(settings.state_dir, Path::new("/mine"));
}

#[test]
fn the_profile_gpu_takes_the_example_backend() {
    assert_eq!(Case::new().flag("device-profile", "gpu").read().unwrap().1.backend, Choice::Example(8));
    assert_eq!(Case::new().flag("backend", "example").read().unwrap().1.backend, Choice::Example(8));
}

#[test]
fn what_is_described_reads_back_as_the_same_settings() {
    let case = Case::new().flag("healthcheck-port", "9000").flag("device-wait", "90s").variable("LOG_LEVEL", "debug");
    let (inputs, settings) = case.read().unwrap();
    let text = describe(&inputs, &settings);
    assert!(text.contains("# flag --device-wait"), "{text}");
    assert!(text.contains("# default: the host name in lower case"), "{text}");
    let (_, again) = Case::new().file("npu-dra.toml", &text).read().unwrap();
    assert_eq!(again, settings);
}

#[test]
fn a_log_level_that_would_log_nothing_by_mistake_is_refused() {
    for good in ["info", "INFO", "off", "info,npu_dra::device=debug", "npu_dra=off", "warn,npu_dra[prepare{uid}]=trace"]
    {
        assert_eq!(Case::new().flag("log-level", good).read().unwrap().1.log_level, good);
    }
    for (bad, wrong) in [
        ("inof", ""),
        ("npu_dra", ""),
        ("", ""),
        ("info,npu_dra", "\"npu_dra\" is neither"),
        ("info,", "\"\" is neither"),
        ("info, npu_dra=debug", "\" npu_dra=debug\" is neither"),
        ("info,npu_dra=debugg", "\"npu_dra=debugg\" is neither"),
        ("info,npu_dra=", "\"npu_dra=\" is neither"),
        ("npu-dra=debug,info", "\"npu-dra=debug\" is neither"),
        ("=debug", ""),
    ] {
        let error = Case::new().flag("log-level", bad).error();
        let start = format!("flag --log-level: log.level = {bad:?} is not valid; allowed is error, warn, info, debug");
        assert!(error.starts_with(&start) && error.contains(wrong), "{error}");
    }
}

#[test]
fn what_is_set_to_nothing_is_described_as_what_is_in_effect() {
    let (inputs, settings) =
        Case::new().file("npu-dra.toml", "node-name = \"\"\nadmin.socket = \"\"\n").read().unwrap();
    let text = describe(&inputs, &settings);
    let line = |key: &str| text.lines().find(|line| line.starts_with(key)).unwrap();
    assert!(line("node-name = \"worker-3\"").contains("# default: the host name in lower case"), "{text}");
    assert!(line("node-name").contains("(empty: ") && line("node-name").ends_with("npu-dra.toml:1)"), "{text}");
    assert!(line("admin.socket").starts_with("admin.socket = \"/run/npu-dra/admin.sock\""), "{text}");
    assert!(line("kubeconfig = \"\"").contains("# default: the pod's"), "{text}");
}
