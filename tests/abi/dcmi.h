/* The part of the vendor's DCMI interface that this driver uses, written down from its description.
 *
 * A C compiler is the judge of the layouts: print.c prints them, the driver and the simulated library compare.
 * Names of enumeration values are ours; numbers, struct and function names are the interface's. */
#ifndef NPU_DRA_TESTS_DCMI_H
#define NPU_DRA_TESTS_DCMI_H

#include <stdint.h>

/* limits */
#define DCMI_MAX_CARDS 64
#define DCMI_MAX_DEVICES_PER_CARD 4
#define DCMI_MAX_VDEVS 32
#define DCMI_MAX_PROCESSES 32
#define DCMI_MAX_ERROR_CODES 128
#define DCMI_MAX_VERSION 255
#define DCMI_VDEV_ID_AUTO 0xFFFFFFFFU
#define DCMI_VDEV_ID_ALL 65535U
#define DCMI_HEALTH_GONE 0xFFFFFFFFU

enum dcmi_unit_type { DCMI_UNIT_NPU = 0, DCMI_UNIT_MCU = 1, DCMI_UNIT_CPU = 2, DCMI_UNIT_INVALID = 0xFF };
enum dcmi_die_type { DCMI_DIE_NDIE = 0, DCMI_DIE_VDIE = 1, DCMI_DIE_DDIE = 2 };
enum dcmi_reset_channel { DCMI_RESET_OUT_OF_BAND = 0, DCMI_RESET_IN_BAND = 1 };
enum dcmi_vdevice_mode { DCMI_VDEVICE_DOCKER = 0, DCMI_VDEVICE_VM = 1 };
enum dcmi_multi_die_policy { DCMI_DIE_POLICY_UNION = 0, DCMI_DIE_POLICY_INDEPENDENT = 1 };

enum dcmi_main_cmd {
    DCMI_MAIN_CHIP_INF = 12,
    DCMI_MAIN_HCCS = 16,
    DCMI_MAIN_SVM = 51,
    DCMI_MAIN_VDEV_MNG = 52,
    DCMI_MAIN_SEC = 53,
    DCMI_MAIN_SIO = 56,
    DCMI_MAIN_DEVICE_SHARE = 0x8001
};

enum dcmi_vdev_sub_cmd {
    DCMI_VDEV_GET_ONE = 0,
    DCMI_VDEV_GET_TOTAL = 1,
    DCMI_VDEV_GET_FREE = 2,
    DCMI_VDEV_SET_SRIOV = 3,
    DCMI_VDEV_GET_ACTIVITY = 5
};

enum dcmi_chip_inf_sub_cmd { DCMI_CHIP_INF_CHIP_ID = 0, DCMI_CHIP_INF_SPOD_INFO = 1 };

enum dcmi_boot_status {
    DCMI_BOOT_UNINIT = 0,
    DCMI_BOOT_BIOS = 1,
    DCMI_BOOT_OS = 2,
    DCMI_BOOT_FINISH = 3,
    DCMI_BOOT_SYSTEM_START_FINISH = 16
};

enum dcmi_device_type {
    DCMI_MEMORY_DDR = 0,
    DCMI_MEMORY_SRAM = 1,
    DCMI_MEMORY_HBM = 2,
    DCMI_MEMORY_NPU = 3,
    DCMI_MEMORY_NONE = 0xFF
};

enum dcmi_freq_type { DCMI_FREQ_DDR = 1, DCMI_FREQ_CTRL_CPU = 2, DCMI_FREQ_HBM = 6, DCMI_FREQ_AICORE = 7 };

enum dcmi_utilization_type {
    DCMI_UTIL_DDR_MEMORY = 1,
    DCMI_UTIL_AICORE = 2,
    DCMI_UTIL_AICPU = 3,
    DCMI_UTIL_HBM = 6,
    DCMI_UTIL_NPU = 13
};

enum dcmi_topo_type {
    DCMI_TOPO_SELF = 0,
    DCMI_TOPO_SYS = 1,
    DCMI_TOPO_PHB = 2,
    DCMI_TOPO_HCCS = 3,
    DCMI_TOPO_PXB = 4,
    DCMI_TOPO_PIX = 5,
    DCMI_TOPO_SIO = 6,
    DCMI_TOPO_HCCS_SW = 7,
    DCMI_TOPO_UB = 8
};

enum dcmi_health {
    DCMI_HEALTH_OK = 0,
    DCMI_HEALTH_MINOR = 1,
    DCMI_HEALTH_MAJOR = 2,
    DCMI_HEALTH_CRITICAL = 3,
    DCMI_HEALTH_UNKNOWN = 4
};

enum dcmi_rdfx_detect_result { DCMI_NETWORK_OK = 0, DCMI_NETWORK_MAX = 0xFF };
enum dcmi_event_type { DCMI_EVENT_DMS_FAULT = 0 };
enum dcmi_event_assertion { DCMI_EVENT_RECOVERED = 0, DCMI_EVENT_OCCURRED = 1, DCMI_EVENT_ONE_SHOT = 2 };
enum dcmi_filter_flag { DCMI_FILTER_EVENT_ID = 1, DCMI_FILTER_SEVERITY = 2, DCMI_FILTER_NODE_TYPE = 4 };
enum dcmi_ip_addr_type { DCMI_IP_V4 = 0, DCMI_IP_V6 = 1 };

enum dcmi_code {
    DCMI_OK = 0,
    DCMI_ERR_INVALID_PARAMETER = -8001,
    DCMI_ERR_OPER_NOT_PERMITTED = -8002,
    DCMI_ERR_MEM_OPERATE_FAIL = -8003,
    DCMI_ERR_SECURE_FUN_FAIL = -8004,
    DCMI_ERR_INNER_ERR = -8005,
    DCMI_ERR_TIME_OUT = -8006,
    DCMI_ERR_INVALID_DEVICE_ID = -8007,
    DCMI_ERR_DEVICE_NOT_EXIST = -8008,
    DCMI_ERR_IOCTL_FAIL = -8009,
    DCMI_ERR_SEND_MSG_FAIL = -8010,
    DCMI_ERR_RECV_MSG_FAIL = -8011,
    DCMI_ERR_NOT_READY = -8012,
    DCMI_ERR_NOT_SUPPORT_IN_CONTAINER = -8013,
    DCMI_ERR_FILE_OPERATE_FAIL = -8014,
    DCMI_ERR_RESET_FAIL = -8015,
    DCMI_ERR_ABORT_OPERATE = -8016,
    DCMI_ERR_IS_UPGRADING = -8017,
    DCMI_ERR_RESOURCE_OCCUPIED = -8020,
    DCMI_ERR_PARTITION_NOT_RIGHT = -8022,
    DCMI_ERR_CONFIG_INFO_NOT_EXIST = -8023,
    DCMI_ERR_NOT_SUPPORT = -8255
};

struct dcmi_chip_info {
    unsigned char chip_type[32];
    unsigned char chip_name[32];
    unsigned char chip_ver[32];
    unsigned int aicore_cnt;
};

struct dcmi_chip_info_v2 {
    unsigned char chip_type[32];
    unsigned char chip_name[32];
    unsigned char chip_ver[32];
    unsigned int aicore_cnt;
    unsigned char npu_name[32];
};

/* device before bus, unlike the newer form */
struct dcmi_pcie_info {
    unsigned int deviceid;
    unsigned int venderid;
    unsigned int subvenderid;
    unsigned int subdeviceid;
    unsigned int bdf_deviceid;
    unsigned int bdf_busid;
    unsigned int bdf_funcid;
};

struct dcmi_pcie_info_all {
    unsigned int venderid;
    unsigned int subvenderid;
    unsigned int deviceid;
    unsigned int subdeviceid;
    int domain;
    unsigned int bdf_busid;
    unsigned int bdf_deviceid;
    unsigned int bdf_funcid;
    unsigned char reserve[32];
};

struct dcmi_board_info {
    unsigned int board_id;
    unsigned int pcb_id;
    unsigned int bom_id;
    unsigned int slot_id;
};

struct dcmi_die_id {
    unsigned int soc_die[5];
};

struct dcmi_elabel_info {
    char product_name[256];
    char model[256];
    char manufacturer[256];
    char manufacturer_date[256];
    char serial_number[256];
};

struct dcmi_hbm_info {
    unsigned long long memory_size;
    unsigned int freq;
    unsigned long long memory_usage;
    int temp;
    unsigned int bandwith_util_rate;
};

struct dcmi_get_memory_info_stru {
    unsigned long long memory_size;
    unsigned long long memory_available;
    unsigned int freq;
    unsigned long hugepagesize;
    unsigned long hugepages_total;
    unsigned long hugepages_free;
    unsigned int utiliza;
    unsigned char reserve[60];
};

struct dcmi_memory_info_stru {
    unsigned long long memory_size;
    unsigned int freq;
    unsigned int utiliza;
};

/* the last two fields are missing in older headers */
struct dcmi_ecc_info {
    int enable_flag;
    unsigned int single_bit_error_cnt;
    unsigned int double_bit_error_cnt;
    unsigned int total_single_bit_error_cnt;
    unsigned int total_double_bit_error_cnt;
    unsigned int single_bit_isolated_pages_cnt;
    unsigned int double_bit_isolated_pages_cnt;
    unsigned int single_bit_next_isolated_pages_cnt;
    unsigned int double_bit_next_isolated_pages_cnt;
};

struct dcmi_proc_mem_info {
    int proc_id;
    unsigned long proc_mem_usage;
};

struct dcmi_base_resource {
    unsigned long long token;
    unsigned long long token_max;
    unsigned long long task_timeout;
    unsigned int vfg_id;
    unsigned char vip_mode;
    unsigned char reserved[31];
};

struct dcmi_computing_resource {
    float aic;
    float aiv;
    unsigned short dsa;
    unsigned short rtsq;
    unsigned short acsq;
    unsigned short cdqm;
    unsigned short c_core;
    unsigned short ffts;
    unsigned short sdma;
    unsigned short pcie_dma;
    unsigned long long memory_size;
    unsigned int event_id;
    unsigned int notify_id;
    unsigned int stream_id;
    unsigned int model_id;
    unsigned short topic_schedule_aicpu;
    unsigned short host_ctrl_cpu;
    unsigned short host_aicpu;
    unsigned short device_aicpu;
    unsigned short topic_ctrl_cpu_slot;
    unsigned int vdev_aicore_utilization;
    unsigned long long vdev_memory_total;
    unsigned long long vdev_memory_free;
    unsigned char reserved[12];
};

struct dcmi_media_resource {
    float jpegd;
    float jpege;
    float vpc;
    float vdec;
    float pngd;
    float venc;
    unsigned char reserved[32];
};

struct dcmi_create_vdev_res_stru {
    unsigned int vdev_id;
    unsigned int vfg_id;
    char template_name[32];
    unsigned char reserved[64];
};

struct dcmi_create_vdev_out {
    unsigned int vdev_id;
    unsigned int pcie_bus;
    unsigned int pcie_device;
    unsigned int pcie_func;
    unsigned int vfg_id;
    unsigned char reserved[32];
};

struct dcmi_vdev_query_info {
    char name[16];
    unsigned int status;
    unsigned int is_container_used;
    unsigned int vfid;
    unsigned int vfg_id;
    unsigned long long container_id;
    struct dcmi_base_resource base;
    struct dcmi_computing_resource computing;
    struct dcmi_media_resource media;
};

struct dcmi_vdev_query_stru {
    unsigned int vdev_id;
    struct dcmi_vdev_query_info query_info;
};

struct dcmi_soc_free_resource {
    unsigned int vfg_num;
    unsigned int vfg_bitmap;
    struct dcmi_base_resource base;
    struct dcmi_computing_resource computing;
    struct dcmi_media_resource media;
};

struct dcmi_soc_total_resource {
    unsigned int vdev_num;
    unsigned int vdev_id[32];
    unsigned int vfg_num;
    unsigned int vfg_bitmap;
    struct dcmi_base_resource base;
    struct dcmi_computing_resource computing;
    struct dcmi_media_resource media;
};

struct dcmi_spod_info {
    unsigned int sdid;
    unsigned int scale_type;
    unsigned int super_pod_id;
    unsigned int server_id;
    unsigned int chassis_id;
    unsigned int super_pod_type;
    unsigned int reserve[6];
};

struct dcmi_dms_fault_event {
    unsigned int event_id;
    unsigned short deviceid;
    unsigned char node_type;
    unsigned char node_id;
    unsigned char sub_node_type;
    unsigned char sub_node_id;
    unsigned char severity;
    unsigned char assertion;
    int event_serial_num;
    int notify_serial_num;
    unsigned long long alarm_raised_time;
    char event_name[256];
    char additional_info[32];
    unsigned char resv[32];
};

struct dcmi_event {
    enum dcmi_event_type type;
    union {
        struct dcmi_dms_fault_event dms_event;
    } event_t;
};

struct dcmi_event_filter {
    unsigned long long filter_flag;
    unsigned int event_id;
    unsigned char severity;
    unsigned char node_type;
    unsigned char resv[32];
};

struct dcmi_multi_utilization_info {
    unsigned int aic_util;
    unsigned int aiv_util;
    unsigned int aicore_util;
    unsigned int npu_util;
    unsigned int reserved[8];
};

struct dcmi_ip_addr {
    union {
        unsigned char ip6[16];
        unsigned char ip4[4];
    } u_addr;
    enum dcmi_ip_addr_type ip_type;
};

/* beyond the first field only the size is known */
struct dcmi_hccs_bandwidth_info {
    int profiling_time;
    double bandwidth[34];
};

/* only the size is known */
struct dcmi_pcie_link_bandwidth_info {
    unsigned long long words[11];
};

typedef void (*dcmi_fault_event_callback)(struct dcmi_event *event);

int dcmi_init(void);
int dcmi_get_dcmi_version(char *ver, unsigned int len);
int dcmi_get_driver_version(char *ver, unsigned int len);
int dcmi_get_card_list(int *card_num, int *card_list, int list_len);
int dcmi_get_card_num_list(int *card_num, int *card_list, int list_len);
int dcmi_get_all_device_count(int *count);
int dcmi_get_device_num_in_card(int card_id, int *num);
int dcmi_get_device_id_in_card(int card_id, int *device_id_max, int *mcu_id, int *cpu_id);
int dcmi_get_device_type(int card_id, int device_id, enum dcmi_unit_type *type);
int dcmi_get_device_logic_id(int *logic_id, int card_id, int device_id);
int dcmi_get_card_id_device_id_from_logicid(int *card_id, int *device_id, unsigned int logic_id);
int dcmi_get_card_id_device_id_from_phyid(int *card_id, int *device_id, unsigned int phy_id);
int dcmi_get_device_phyid_from_logicid(unsigned int logic_id, unsigned int *phy_id);
int dcmi_get_device_logicid_from_phyid(unsigned int phy_id, unsigned int *logic_id);
int dcmi_get_fault_device_num_in_card(int card_id, int *num);

int dcmi_get_device_chip_info(int card_id, int device_id, struct dcmi_chip_info *info);
int dcmi_get_device_chip_info_v2(int card_id, int device_id, struct dcmi_chip_info_v2 *info);
int dcmi_get_device_pcie_info(int card_id, int device_id, struct dcmi_pcie_info *info);
int dcmi_get_device_pcie_info_v2(int card_id, int device_id, struct dcmi_pcie_info_all *info);
int dcmi_get_device_board_info(int card_id, int device_id, struct dcmi_board_info *info);
int dcmi_get_mainboard_id(int card_id, int device_id, unsigned int *id);
int dcmi_get_product_type(int card_id, int device_id, char *buf, int buf_size);
int dcmi_get_device_die_v2(int card_id, int device_id, enum dcmi_die_type type, struct dcmi_die_id *id);
int dcmi_get_card_elabel_v2(int card_id, struct dcmi_elabel_info *info);
int dcmi_get_device_boot_status(int card_id, int device_id, enum dcmi_boot_status *status);
int dcmi_get_npu_work_mode(int card_id, unsigned char *mode);

int dcmi_get_device_hbm_info(int card_id, int device_id, struct dcmi_hbm_info *info);
int dcmi_get_device_memory_info_v3(int card_id, int device_id, struct dcmi_get_memory_info_stru *info);
int dcmi_get_memory_info(int card_id, int device_id, struct dcmi_memory_info_stru *info);
int dcmi_get_device_memory_info_v2(int card_id, int device_id, struct dcmi_memory_info_stru *info);
int dcmi_get_device_utilization_rate(int card_id, int device_id, int type, unsigned int *percent);
int dcmi_get_device_multi_utilization_rate(int card_id, int device_id, struct dcmi_multi_utilization_info *info);
int dcmi_get_device_temperature(int card_id, int device_id, int *temperature);
int dcmi_get_device_power_info(int card_id, int device_id, int *power);
int dcmi_mcu_get_power_info(int card_id, int *power);
int dcmi_get_device_voltage(int card_id, int device_id, unsigned int *voltage);
int dcmi_get_device_frequency(int card_id, int device_id, enum dcmi_freq_type type, unsigned int *frequency);
int dcmi_get_device_ecc_info(int card_id, int device_id, enum dcmi_device_type type, struct dcmi_ecc_info *info);
int dcmi_get_device_resource_info(int card_id, int device_id, struct dcmi_proc_mem_info *list, int *num);
int dcmi_get_pcie_link_bandwidth_info(int card_id, int device_id, struct dcmi_pcie_link_bandwidth_info *info);

int dcmi_get_device_health(int card_id, int device_id, unsigned int *health);
int dcmi_get_driver_health(unsigned int *health);
int dcmi_get_device_errorcode_v2(int card_id, int device_id, int *count, unsigned int *list, unsigned int list_len);
int dcmi_get_driver_errorcode(int *count, unsigned int *list, unsigned int list_len);
int dcmi_get_device_errorcode_string(int card_id, int device_id, unsigned int code, unsigned char *buf, int buf_size);
int dcmi_subscribe_fault_event(int card_id, int device_id, struct dcmi_event_filter filter,
                               dcmi_fault_event_callback handler);
int dcmi_get_fault_event(int card_id, int device_id, int timeout, struct dcmi_event_filter filter,
                         struct dcmi_event *event);
int dcmi_get_device_current_fault_event(int card_id, int device_id, struct dcmi_event *buf, int buf_len, int *count);
int dcmi_get_device_network_health(int card_id, int device_id, enum dcmi_rdfx_detect_result *result);

int dcmi_get_affinity_cpu_info_by_device_id(int card_id, int device_id, char *cpu_list, int *len);
int dcmi_get_topo_info_by_device_id(int card_id1, int device_id1, int card_id2, int device_id2, int *topo_type);
int dcmi_get_netdev_brother_device(int card_id, int device_id, int *brother_card_id);
int dcmi_get_hccs_link_bandwidth_info(int card_id, int device_id, struct dcmi_hccs_bandwidth_info *info);
int dcmi_get_spod_node_status(int card_id, int device_id, unsigned int sdid, unsigned int *status);
int dcmi_set_spod_node_status(int card_id, int device_id, unsigned int sdid, unsigned int status);
int dcmi_get_multi_die_policy(enum dcmi_multi_die_policy *policy);
int dcmi_set_multi_die_policy(enum dcmi_multi_die_policy policy);

int dcmi_get_device_info(int card_id, int device_id, enum dcmi_main_cmd main_cmd, unsigned int sub_cmd, void *buf,
                         unsigned int *size);
int dcmi_set_device_info(int card_id, int device_id, enum dcmi_main_cmd main_cmd, unsigned int sub_cmd,
                         const void *buf, unsigned int size);

int dcmi_create_vdevice(int card_id, int device_id, struct dcmi_create_vdev_res_stru *vdev,
                        struct dcmi_create_vdev_out *out);
int dcmi_set_destroy_vdevice(int card_id, int device_id, unsigned int vdev_id);
int dcmi_get_vdevice_mode(int *mode);
int dcmi_set_vdevice_mode(int mode);
int dcmi_get_vnpu_config_recover_mode(unsigned int *mode);
int dcmi_set_vnpu_config_recover_mode(unsigned int mode);

int dcmi_get_device_share_enable(int card_id, int device_id, int *enable);
int dcmi_set_device_share_enable(int card_id, int device_id, int enable);
int dcmi_set_device_reset(int card_id, int device_id, enum dcmi_reset_channel channel);
int dcmi_set_device_pre_reset(int card_id, int device_id);
int dcmi_pre_reset_soc(int card_id, int device_id);
int dcmi_set_device_rescan(int card_id, int device_id);
int dcmi_rescan_soc(int card_id, int device_id);
int dcmi_get_device_outband_channel_state(int card_id, int device_id, int *state);

#endif
