/* Prints every size, alignment, offset and constant of dcmi.h as lines of "name value". */
#include <stddef.h>
#include <stdio.h>

#include "dcmi.h"

#define STRUCT(type)                                                                                              \
    printf("sizeof." #type " %zu\n", sizeof(struct type));                                                        \
    printf("alignof." #type " %zu\n", _Alignof(struct type))
#define FIELD(type, field) printf("offsetof." #type "." #field " %zu\n", offsetof(struct type, field))
#define CONSTANT(name) printf(#name " %lld\n", (long long)(name))

int main(void) {
    STRUCT(dcmi_chip_info);
    FIELD(dcmi_chip_info, chip_type);
    FIELD(dcmi_chip_info, chip_name);
    FIELD(dcmi_chip_info, chip_ver);
    FIELD(dcmi_chip_info, aicore_cnt);

    STRUCT(dcmi_chip_info_v2);
    FIELD(dcmi_chip_info_v2, chip_type);
    FIELD(dcmi_chip_info_v2, chip_name);
    FIELD(dcmi_chip_info_v2, chip_ver);
    FIELD(dcmi_chip_info_v2, aicore_cnt);
    FIELD(dcmi_chip_info_v2, npu_name);

    STRUCT(dcmi_pcie_info);
    FIELD(dcmi_pcie_info, deviceid);
    FIELD(dcmi_pcie_info, venderid);
    FIELD(dcmi_pcie_info, subvenderid);
    FIELD(dcmi_pcie_info, subdeviceid);
    FIELD(dcmi_pcie_info, bdf_deviceid);
    FIELD(dcmi_pcie_info, bdf_busid);
    FIELD(dcmi_pcie_info, bdf_funcid);

    STRUCT(dcmi_pcie_info_all);
    FIELD(dcmi_pcie_info_all, venderid);
    FIELD(dcmi_pcie_info_all, subvenderid);
    FIELD(dcmi_pcie_info_all, deviceid);
    FIELD(dcmi_pcie_info_all, subdeviceid);
    FIELD(dcmi_pcie_info_all, domain);
    FIELD(dcmi_pcie_info_all, bdf_busid);
    FIELD(dcmi_pcie_info_all, bdf_deviceid);
    FIELD(dcmi_pcie_info_all, bdf_funcid);
    FIELD(dcmi_pcie_info_all, reserve);

    STRUCT(dcmi_board_info);
    FIELD(dcmi_board_info, board_id);
    FIELD(dcmi_board_info, pcb_id);
    FIELD(dcmi_board_info, bom_id);
    FIELD(dcmi_board_info, slot_id);

    STRUCT(dcmi_die_id);
    FIELD(dcmi_die_id, soc_die);

    STRUCT(dcmi_elabel_info);
    FIELD(dcmi_elabel_info, product_name);
    FIELD(dcmi_elabel_info, model);
    FIELD(dcmi_elabel_info, manufacturer);
    FIELD(dcmi_elabel_info, manufacturer_date);
    FIELD(dcmi_elabel_info, serial_number);

    STRUCT(dcmi_hbm_info);
    FIELD(dcmi_hbm_info, memory_size);
    FIELD(dcmi_hbm_info, freq);
    FIELD(dcmi_hbm_info, memory_usage);
    FIELD(dcmi_hbm_info, temp);
    FIELD(dcmi_hbm_info, bandwith_util_rate);

    STRUCT(dcmi_get_memory_info_stru);
    FIELD(dcmi_get_memory_info_stru, memory_size);
    FIELD(dcmi_get_memory_info_stru, memory_available);
    FIELD(dcmi_get_memory_info_stru, freq);
    FIELD(dcmi_get_memory_info_stru, hugepagesize);
    FIELD(dcmi_get_memory_info_stru, hugepages_total);
    FIELD(dcmi_get_memory_info_stru, hugepages_free);
    FIELD(dcmi_get_memory_info_stru, utiliza);
    FIELD(dcmi_get_memory_info_stru, reserve);

    STRUCT(dcmi_memory_info_stru);
    FIELD(dcmi_memory_info_stru, memory_size);
    FIELD(dcmi_memory_info_stru, freq);
    FIELD(dcmi_memory_info_stru, utiliza);

    STRUCT(dcmi_ecc_info);
    FIELD(dcmi_ecc_info, enable_flag);
    FIELD(dcmi_ecc_info, single_bit_error_cnt);
    FIELD(dcmi_ecc_info, double_bit_error_cnt);
    FIELD(dcmi_ecc_info, total_single_bit_error_cnt);
    FIELD(dcmi_ecc_info, total_double_bit_error_cnt);
    FIELD(dcmi_ecc_info, single_bit_isolated_pages_cnt);
    FIELD(dcmi_ecc_info, double_bit_isolated_pages_cnt);
    FIELD(dcmi_ecc_info, single_bit_next_isolated_pages_cnt);
    FIELD(dcmi_ecc_info, double_bit_next_isolated_pages_cnt);

    STRUCT(dcmi_proc_mem_info);
    FIELD(dcmi_proc_mem_info, proc_id);
    FIELD(dcmi_proc_mem_info, proc_mem_usage);

    STRUCT(dcmi_base_resource);
    FIELD(dcmi_base_resource, token);
    FIELD(dcmi_base_resource, token_max);
    FIELD(dcmi_base_resource, task_timeout);
    FIELD(dcmi_base_resource, vfg_id);
    FIELD(dcmi_base_resource, vip_mode);
    FIELD(dcmi_base_resource, reserved);

    STRUCT(dcmi_computing_resource);
    FIELD(dcmi_computing_resource, aic);
    FIELD(dcmi_computing_resource, aiv);
    FIELD(dcmi_computing_resource, dsa);
    FIELD(dcmi_computing_resource, rtsq);
    FIELD(dcmi_computing_resource, acsq);
    FIELD(dcmi_computing_resource, cdqm);
    FIELD(dcmi_computing_resource, c_core);
    FIELD(dcmi_computing_resource, ffts);
    FIELD(dcmi_computing_resource, sdma);
    FIELD(dcmi_computing_resource, pcie_dma);
    FIELD(dcmi_computing_resource, memory_size);
    FIELD(dcmi_computing_resource, event_id);
    FIELD(dcmi_computing_resource, notify_id);
    FIELD(dcmi_computing_resource, stream_id);
    FIELD(dcmi_computing_resource, model_id);
    FIELD(dcmi_computing_resource, topic_schedule_aicpu);
    FIELD(dcmi_computing_resource, host_ctrl_cpu);
    FIELD(dcmi_computing_resource, host_aicpu);
    FIELD(dcmi_computing_resource, device_aicpu);
    FIELD(dcmi_computing_resource, topic_ctrl_cpu_slot);
    FIELD(dcmi_computing_resource, vdev_aicore_utilization);
    FIELD(dcmi_computing_resource, vdev_memory_total);
    FIELD(dcmi_computing_resource, vdev_memory_free);
    FIELD(dcmi_computing_resource, reserved);

    STRUCT(dcmi_media_resource);
    FIELD(dcmi_media_resource, jpegd);
    FIELD(dcmi_media_resource, jpege);
    FIELD(dcmi_media_resource, vpc);
    FIELD(dcmi_media_resource, vdec);
    FIELD(dcmi_media_resource, pngd);
    FIELD(dcmi_media_resource, venc);
    FIELD(dcmi_media_resource, reserved);

    STRUCT(dcmi_create_vdev_res_stru);
    FIELD(dcmi_create_vdev_res_stru, vdev_id);
    FIELD(dcmi_create_vdev_res_stru, vfg_id);
    FIELD(dcmi_create_vdev_res_stru, template_name);
    FIELD(dcmi_create_vdev_res_stru, reserved);

    STRUCT(dcmi_create_vdev_out);
    FIELD(dcmi_create_vdev_out, vdev_id);
    FIELD(dcmi_create_vdev_out, pcie_bus);
    FIELD(dcmi_create_vdev_out, pcie_device);
    FIELD(dcmi_create_vdev_out, pcie_func);
    FIELD(dcmi_create_vdev_out, vfg_id);
    FIELD(dcmi_create_vdev_out, reserved);

    STRUCT(dcmi_vdev_query_info);
    FIELD(dcmi_vdev_query_info, name);
    FIELD(dcmi_vdev_query_info, status);
    FIELD(dcmi_vdev_query_info, is_container_used);
    FIELD(dcmi_vdev_query_info, vfid);
    FIELD(dcmi_vdev_query_info, vfg_id);
    FIELD(dcmi_vdev_query_info, container_id);
    FIELD(dcmi_vdev_query_info, base);
    FIELD(dcmi_vdev_query_info, computing);
    FIELD(dcmi_vdev_query_info, media);

    STRUCT(dcmi_vdev_query_stru);
    FIELD(dcmi_vdev_query_stru, vdev_id);
    FIELD(dcmi_vdev_query_stru, query_info);

    STRUCT(dcmi_soc_free_resource);
    FIELD(dcmi_soc_free_resource, vfg_num);
    FIELD(dcmi_soc_free_resource, vfg_bitmap);
    FIELD(dcmi_soc_free_resource, base);
    FIELD(dcmi_soc_free_resource, computing);
    FIELD(dcmi_soc_free_resource, media);

    STRUCT(dcmi_soc_total_resource);
    FIELD(dcmi_soc_total_resource, vdev_num);
    FIELD(dcmi_soc_total_resource, vdev_id);
    FIELD(dcmi_soc_total_resource, vfg_num);
    FIELD(dcmi_soc_total_resource, vfg_bitmap);
    FIELD(dcmi_soc_total_resource, base);
    FIELD(dcmi_soc_total_resource, computing);
    FIELD(dcmi_soc_total_resource, media);

    STRUCT(dcmi_spod_info);
    FIELD(dcmi_spod_info, sdid);
    FIELD(dcmi_spod_info, scale_type);
    FIELD(dcmi_spod_info, super_pod_id);
    FIELD(dcmi_spod_info, server_id);
    FIELD(dcmi_spod_info, chassis_id);
    FIELD(dcmi_spod_info, super_pod_type);
    FIELD(dcmi_spod_info, reserve);

    STRUCT(dcmi_dms_fault_event);
    FIELD(dcmi_dms_fault_event, event_id);
    FIELD(dcmi_dms_fault_event, deviceid);
    FIELD(dcmi_dms_fault_event, node_type);
    FIELD(dcmi_dms_fault_event, node_id);
    FIELD(dcmi_dms_fault_event, sub_node_type);
    FIELD(dcmi_dms_fault_event, sub_node_id);
    FIELD(dcmi_dms_fault_event, severity);
    FIELD(dcmi_dms_fault_event, assertion);
    FIELD(dcmi_dms_fault_event, event_serial_num);
    FIELD(dcmi_dms_fault_event, notify_serial_num);
    FIELD(dcmi_dms_fault_event, alarm_raised_time);
    FIELD(dcmi_dms_fault_event, event_name);
    FIELD(dcmi_dms_fault_event, additional_info);
    FIELD(dcmi_dms_fault_event, resv);

    STRUCT(dcmi_event);
    FIELD(dcmi_event, type);
    FIELD(dcmi_event, event_t);

    STRUCT(dcmi_event_filter);
    FIELD(dcmi_event_filter, filter_flag);
    FIELD(dcmi_event_filter, event_id);
    FIELD(dcmi_event_filter, severity);
    FIELD(dcmi_event_filter, node_type);
    FIELD(dcmi_event_filter, resv);

    STRUCT(dcmi_multi_utilization_info);
    FIELD(dcmi_multi_utilization_info, aic_util);
    FIELD(dcmi_multi_utilization_info, aiv_util);
    FIELD(dcmi_multi_utilization_info, aicore_util);
    FIELD(dcmi_multi_utilization_info, npu_util);
    FIELD(dcmi_multi_utilization_info, reserved);

    STRUCT(dcmi_ip_addr);
    FIELD(dcmi_ip_addr, u_addr);
    FIELD(dcmi_ip_addr, ip_type);

    STRUCT(dcmi_hccs_bandwidth_info);
    FIELD(dcmi_hccs_bandwidth_info, profiling_time);
    FIELD(dcmi_hccs_bandwidth_info, bandwidth);

    STRUCT(dcmi_pcie_link_bandwidth_info);
    FIELD(dcmi_pcie_link_bandwidth_info, words);

    printf("sizeof.enum %zu\n", sizeof(enum dcmi_main_cmd));
    CONSTANT(DCMI_MAX_CARDS);
    CONSTANT(DCMI_MAX_DEVICES_PER_CARD);
    CONSTANT(DCMI_MAX_VDEVS);
    CONSTANT(DCMI_MAX_PROCESSES);
    CONSTANT(DCMI_MAX_ERROR_CODES);
    CONSTANT(DCMI_MAX_VERSION);
    CONSTANT(DCMI_VDEV_ID_AUTO);
    CONSTANT(DCMI_VDEV_ID_ALL);
    CONSTANT(DCMI_HEALTH_GONE);
    CONSTANT(DCMI_UNIT_NPU);
    CONSTANT(DCMI_UNIT_MCU);
    CONSTANT(DCMI_UNIT_CPU);
    CONSTANT(DCMI_UNIT_INVALID);
    CONSTANT(DCMI_DIE_NDIE);
    CONSTANT(DCMI_DIE_VDIE);
    CONSTANT(DCMI_DIE_DDIE);
    CONSTANT(DCMI_RESET_OUT_OF_BAND);
    CONSTANT(DCMI_RESET_IN_BAND);
    CONSTANT(DCMI_VDEVICE_DOCKER);
    CONSTANT(DCMI_VDEVICE_VM);
    CONSTANT(DCMI_DIE_POLICY_UNION);
    CONSTANT(DCMI_DIE_POLICY_INDEPENDENT);
    CONSTANT(DCMI_MAIN_CHIP_INF);
    CONSTANT(DCMI_MAIN_HCCS);
    CONSTANT(DCMI_MAIN_SVM);
    CONSTANT(DCMI_MAIN_VDEV_MNG);
    CONSTANT(DCMI_MAIN_SEC);
    CONSTANT(DCMI_MAIN_SIO);
    CONSTANT(DCMI_MAIN_DEVICE_SHARE);
    CONSTANT(DCMI_VDEV_GET_ONE);
    CONSTANT(DCMI_VDEV_GET_TOTAL);
    CONSTANT(DCMI_VDEV_GET_FREE);
    CONSTANT(DCMI_VDEV_SET_SRIOV);
    CONSTANT(DCMI_VDEV_GET_ACTIVITY);
    CONSTANT(DCMI_CHIP_INF_CHIP_ID);
    CONSTANT(DCMI_CHIP_INF_SPOD_INFO);
    CONSTANT(DCMI_BOOT_UNINIT);
    CONSTANT(DCMI_BOOT_BIOS);
    CONSTANT(DCMI_BOOT_OS);
    CONSTANT(DCMI_BOOT_FINISH);
    CONSTANT(DCMI_BOOT_SYSTEM_START_FINISH);
    CONSTANT(DCMI_MEMORY_DDR);
    CONSTANT(DCMI_MEMORY_SRAM);
    CONSTANT(DCMI_MEMORY_HBM);
    CONSTANT(DCMI_MEMORY_NPU);
    CONSTANT(DCMI_MEMORY_NONE);
    CONSTANT(DCMI_FREQ_DDR);
    CONSTANT(DCMI_FREQ_CTRL_CPU);
    CONSTANT(DCMI_FREQ_HBM);
    CONSTANT(DCMI_FREQ_AICORE);
    CONSTANT(DCMI_UTIL_DDR_MEMORY);
    CONSTANT(DCMI_UTIL_AICORE);
    CONSTANT(DCMI_UTIL_AICPU);
    CONSTANT(DCMI_UTIL_HBM);
    CONSTANT(DCMI_UTIL_NPU);
    CONSTANT(DCMI_TOPO_SELF);
    CONSTANT(DCMI_TOPO_SYS);
    CONSTANT(DCMI_TOPO_PHB);
    CONSTANT(DCMI_TOPO_HCCS);
    CONSTANT(DCMI_TOPO_PXB);
    CONSTANT(DCMI_TOPO_PIX);
    CONSTANT(DCMI_TOPO_SIO);
    CONSTANT(DCMI_TOPO_HCCS_SW);
    CONSTANT(DCMI_TOPO_UB);
    CONSTANT(DCMI_HEALTH_OK);
    CONSTANT(DCMI_HEALTH_MINOR);
    CONSTANT(DCMI_HEALTH_MAJOR);
    CONSTANT(DCMI_HEALTH_CRITICAL);
    CONSTANT(DCMI_HEALTH_UNKNOWN);
    CONSTANT(DCMI_NETWORK_OK);
    CONSTANT(DCMI_NETWORK_MAX);
    CONSTANT(DCMI_EVENT_DMS_FAULT);
    CONSTANT(DCMI_EVENT_RECOVERED);
    CONSTANT(DCMI_EVENT_OCCURRED);
    CONSTANT(DCMI_EVENT_ONE_SHOT);
    CONSTANT(DCMI_FILTER_EVENT_ID);
    CONSTANT(DCMI_FILTER_SEVERITY);
    CONSTANT(DCMI_FILTER_NODE_TYPE);
    CONSTANT(DCMI_IP_V4);
    CONSTANT(DCMI_IP_V6);
    CONSTANT(DCMI_OK);
    CONSTANT(DCMI_ERR_INVALID_PARAMETER);
    CONSTANT(DCMI_ERR_OPER_NOT_PERMITTED);
    CONSTANT(DCMI_ERR_MEM_OPERATE_FAIL);
    CONSTANT(DCMI_ERR_SECURE_FUN_FAIL);
    CONSTANT(DCMI_ERR_INNER_ERR);
    CONSTANT(DCMI_ERR_TIME_OUT);
    CONSTANT(DCMI_ERR_INVALID_DEVICE_ID);
    CONSTANT(DCMI_ERR_DEVICE_NOT_EXIST);
    CONSTANT(DCMI_ERR_IOCTL_FAIL);
    CONSTANT(DCMI_ERR_SEND_MSG_FAIL);
    CONSTANT(DCMI_ERR_RECV_MSG_FAIL);
    CONSTANT(DCMI_ERR_NOT_READY);
    CONSTANT(DCMI_ERR_NOT_SUPPORT_IN_CONTAINER);
    CONSTANT(DCMI_ERR_FILE_OPERATE_FAIL);
    CONSTANT(DCMI_ERR_RESET_FAIL);
    CONSTANT(DCMI_ERR_ABORT_OPERATE);
    CONSTANT(DCMI_ERR_IS_UPGRADING);
    CONSTANT(DCMI_ERR_RESOURCE_OCCUPIED);
    CONSTANT(DCMI_ERR_PARTITION_NOT_RIGHT);
    CONSTANT(DCMI_ERR_CONFIG_INFO_NOT_EXIST);
    CONSTANT(DCMI_ERR_NOT_SUPPORT);
    return 0;
}
